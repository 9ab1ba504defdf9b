"""Fitted numbers of a framework on a cluster, put in the place of the profiles' own."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from planner.errors import ProfileError
from planner.framework.spec import FrameworkSpec
from planner.hardware.fields import near_names
from planner.hardware.spec import ClusterSpec, LinkSpec
from planner.units import GIB, MIB

Tuned = tuple[FrameworkSpec, ClusterSpec]

Setting = Callable[[FrameworkSpec, ClusterSpec, float], Tuned]


def _framework(field: str, scale: float = 1.0) -> Setting:
    def put(spec: FrameworkSpec, cluster: ClusterSpec, value: float) -> Tuned:
        return replace(spec, **{field: value * scale}), cluster  # type: ignore[arg-type]

    return put


def _device(field: str, scale: float = 1.0) -> Setting:
    def put(spec: FrameworkSpec, cluster: ClusterSpec, value: float) -> Tuned:
        device = replace(cluster.device, **{field: value * scale})  # type: ignore[arg-type]
        return spec, replace(cluster, device=device)

    return put


def _efficiency(*fields: str) -> Setting:
    """The first field takes the value, the others keep their proportion to it."""

    def put(spec: FrameworkSpec, cluster: ClusterSpec, value: float) -> Tuned:
        efficiency = cluster.device.efficiency
        factor = value / getattr(efficiency, fields[0])
        changed = {field: getattr(efficiency, field) * factor for field in fields}
        device = replace(cluster.device, efficiency=replace(efficiency, **changed))
        return spec, replace(cluster, device=device)

    return put


def _links(position: int, change: Callable[[LinkSpec, float], LinkSpec]) -> Setting:
    def put(spec: FrameworkSpec, cluster: ClusterSpec, value: float) -> Tuned:
        links = list(cluster.links)
        links[position] = change(links[position], value)
        return spec, replace(cluster, links=tuple(links))

    return put


def _bandwidth(link: LinkSpec, share: float) -> LinkSpec:
    return replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * share)


def _latency(link: LinkSpec, factor: float) -> LinkSpec:
    return replace(
        link, latency_s=link.latency_s * factor, base_latency_s=link.base_latency_s * factor
    )


SETTINGS: Mapping[str, Setting] = {
    "host_dispatch_us": _device("host_dispatch_s", 1e-6),
    "kernel_launch_us": _device("kernel_launch_s", 1e-6),
    "sustained_fraction_of_peak": _efficiency("sustained_fraction", "matmul_fraction"),
    "matmul_k_overhead_elements": _efficiency("matmul_k_overhead"),
    "attention_forward_fraction_of_peak": _efficiency(
        "attention_forward_fraction", "attention_backward_fraction"
    ),
    "pointwise_fraction_of_bandwidth": _efficiency(
        "pointwise_bandwidth_fraction", "reduction_bandwidth_fraction"
    ),
    "inner_bandwidth_share": _links(0, _bandwidth),
    "inner_latency_factor": _links(0, _latency),
    "outer_bandwidth_share": _links(-1, _bandwidth),
    "outer_latency_factor": _links(-1, _latency),
    "collective_host_us": _framework("collective_host_s", 1e-6),
    "network_host_us_per_rank": _framework("network_host_s", 1e-6),
    "bucket_mib": _framework("bucket_bytes", MIB),
    "gradient_overlap": _framework("gradient_overlap"),
    "partial_ring_share": _framework("partial_ring_share"),
    "tp_overlap": _framework("tp_overlap"),
    "message_us": _framework("message_s", 1e-6),
    "congested_message_us": _framework("congested_message_s", 1e-6),
    "step_us": _framework("step_s", 1e-6),
    "optimizer_moved_bytes_per_parameter": _framework("optimizer_moved_bytes"),
    "accumulated_bytes_per_parameter": _framework("accumulated_bytes"),
    "piled_share": _framework("piled_share"),
    "reserve_gib": _framework("reserve_bytes", GIB),
}
"""What can be fitted: constants of the framework and of what it reaches of the hardware."""


def tune(framework: FrameworkSpec, cluster: ClusterSpec, values: Mapping[str, float]) -> Tuned:
    """Put numbers in place.

    Args:
        framework: A framework.
        cluster: A cluster that it ran on.
        values: Numbers by their keys in ``SETTINGS``.

    Raises:
        ProfileError: A key is unknown.
    """
    for key, value in values.items():
        if key not in SETTINGS:
            raise ProfileError(
                f"framework {framework.name!r} tunes {key!r}, which is not a constant",
                hint=near_names(key, SETTINGS),
            )
        framework, cluster = SETTINGS[key](framework, cluster, value)
    return framework, cluster
