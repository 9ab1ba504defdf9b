"""Ranks that share the cores of a node."""

from dataclasses import asdict, replace

from planner.hardware.spec import ClusterSpec, ScriptHost


def share_node(cluster: ClusterSpec, full_speed_ranks: float) -> ClusterSpec:
    """Slow ranks and links down where more processes run on a node than it has cores for."""
    share = min(1.0, full_speed_ranks / cluster.gpus_per_node)
    device = cluster.device
    slowed = replace(
        device,
        memory_bytes=round(device.memory_bytes / cluster.gpus_per_node),
        peak_flop_per_s={dtype: peak * share for dtype, peak in device.peak_flop_per_s.items()},
        memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s * share,
        kernel_launch_s=device.kernel_launch_s / share,
        op_curves={
            name: tuple((size, seconds / share) for size, seconds in curve)
            for name, curve in device.op_curves.items()
        },
    )
    script = cluster.script_host
    if script is not None:
        script = ScriptHost(**{key: value / share for key, value in asdict(script).items()})
    links = tuple(
        replace(
            link,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * share,
            latency_s=link.latency_s / share,
            base_latency_s=link.base_latency_s / share,
        )
        for link in cluster.links
    )
    return replace(
        cluster, device=slowed, links=links, script_host=script, ranks_per_core=1 / share
    )
