"""Profiles of a measured machine as TOML, every number with when, where and how."""

import json
from collections.abc import Iterable, Mapping, Sequence

from planner.cost.op import ATTENTION_CURVES
from planner.cost.work import op_kind
from planner.hardware.fields import FORMAT
from planner.hardware.profiles import PEAK_KEYS
from planner.hardware.spec import Curve, DeviceSpec, EfficiencySpec, Provenance, ScriptHost
from planner.profiling.links import LinkFound
from planner.profiling.points import Machine, Settings
from planner.units import GB, GIB, MIB, TERA

_SOUND_SPREAD = 1.6
"""Where the slowest tenth of repeats takes more than so many times the fastest, something else ran
beside them, and what they say is not written as measured."""


class Writer:
    """Writes numbers with where they come from."""

    def __init__(self, machine: Machine, settings: Settings, date: str, spread: float) -> None:
        """Keep what all sources begin with.

        Args:
            machine: What was measured.
            settings: How.
            date: When.
            spread: Of the repeats of an op.
        """
        self.machine = machine
        self.settings = settings
        self.spread = spread
        hosts = "" if settings.hosts == 1 else f"{settings.hosts} hosts, on each "
        ranks = (
            "1 process" if settings.processes == 1 else f"{settings.processes} processes at once"
        )
        self.where = f"{date}, {hosts}{machine.words}, {ranks}"

    def number(
        self,
        key: str,
        value: object,
        how: str,
        provenance: Provenance = Provenance.MEASURED,
        *,
        spread: float = 1.0,
    ) -> str:
        """Write one number."""
        is_assumed = provenance is Provenance.ASSUMED
        source = how if is_assumed else f"plan profile on {self.where}: {how}"
        if spread > _SOUND_SPREAD:
            provenance = Provenance.ASSUMED
            source += f"; repeats differ {spread:.1f} times, so other work ran beside them"
        rounded = float(f"{value:.5g}") if isinstance(value, float) else value
        return (
            f'{key} = {{ value = {json.dumps(rounded)}, provenance = "{provenance}", '
            f"source = {json.dumps(source)} }}"
        )


def device_text(
    name: str, device: DeviceSpec, writer: Writer, *, residue: Mapping[str, float]
) -> str:
    """Write the profile of the device, with what was found beyond tensors and beside them."""
    efficiency = device.efficiency
    fitted, assumed = Provenance.FITTED, Provenance.ASSUMED

    def measured(
        key: str, value: object, how: str, provenance: Provenance = Provenance.MEASURED
    ) -> str:
        return writer.number(key, value, how, provenance, spread=writer.spread)

    lines = [
        f"format = {FORMAT}",
        f"name = {json.dumps(name)}",
        f"description = {json.dumps(writer.where)}",
        "",
        *_memory(device, residue, writer),
        measured(
            "memory_bandwidth_gb_per_s",
            device.memory_bandwidth_bytes_per_s / GB,
            "the fastest op on its largest operands",
        ),
    ]
    keys = {dtype: key for key, dtype in PEAK_KEYS.items()}
    lines += [
        measured(keys[dtype], peak / TERA, "the fastest matrix product")
        for dtype, peak in device.peak_flop_per_s.items()
    ]
    lines += [
        writer.number("num_sms", device.num_sms, "one thread of a CPU, or what the GPU says"),
        "",
        measured(
            "kernel_launch_us",
            device.kernel_launch_s * 1e6,
            "forward and backward of small transformer blocks, over their ops",
            fitted,
        ),
        writer.number("sustained_fraction_of_peak", 1.0, "the peak is a measured one", assumed),
        writer.number("training_fraction_of_sustained", 1.0, "start of a fit", assumed),
        writer.number("matmul_tiles_m_n", [list(t) for t in efficiency.matmul_tiles],
                      "usual tiles of such libraries", assumed),
    ]  # fmt: skip
    lines += _fitted(efficiency, writer)
    for op, curve in sorted(device.op_curves.items()):
        lines += ["", "[[ops]]", f"name = {json.dumps(op)}", _curve(op, curve, writer)]
    return "\n".join(lines) + "\n"


def _memory(device: DeviceSpec, residue: Mapping[str, float], writer: Writer) -> Iterable[str]:
    yield writer.number("memory_gib", device.memory_bytes / GIB, "memory of the machine")
    how = "memory of a rank that has trained, its tensors freed"
    yield writer.number("reserve_gib", residue["used_bytes"] / GIB, how)
    if "allocator_share" in residue:  # of a host
        how = "growth of a process that trains small transformers, over their live tensors"
        yield writer.number("allocator_share", residue["allocator_share"], how)


def _fitted(efficiency: EfficiencySpec, writer: Writer) -> Iterable[str]:
    """Write what the ops were fitted by."""
    products, rates, scores = "matrix products", "ops without a curve", "attention"
    for key, value, how in (
        ("matmul_fraction_of_peak", efficiency.matmul_fraction, products),
        ("matmul_tile_overhead_elements", efficiency.matmul_tile_overhead, products),
        ("matmul_k_overhead_elements", efficiency.matmul_k_overhead, products),
        ("matmul_setup_us", efficiency.matmul_setup_s * 1e6, products),
        ("matmul_fraction_of_bandwidth", efficiency.matmul_bandwidth_fraction, products),
        ("pointwise_fraction_of_bandwidth", efficiency.pointwise_bandwidth_fraction, rates),
        ("reduction_fraction_of_bandwidth", efficiency.reduction_bandwidth_fraction, rates),
        ("embedding_fraction_of_bandwidth", efficiency.embedding_bandwidth_fraction, rates),
        ("attention_forward_fraction_of_peak", efficiency.attention_forward_fraction, scores),
        ("attention_backward_fraction_of_peak", efficiency.attention_backward_fraction, scores),
        ("attention_fill_keys", efficiency.attention_fill_keys, scores),
        ("attention_head_overhead_elements", efficiency.attention_head_overhead, scores),
        ("attention_masked_share", efficiency.attention_masked_share, scores),
    ):
        yield writer.number(key, value, how, Provenance.FITTED, spread=writer.spread)


def _curve(op: str, curve: Curve, writer: Writer) -> str:
    key, unit, second = "us_by_mib", MIB, 1e6
    if op in ATTENTION_CURVES:
        key, unit, second = "ns_by_head_dim", 1, 1e9
    elif op_kind(op) == "matmul":
        key, unit = "us_by_gflop", GB
    points = [[float(f"{size / unit:.5g}"), float(f"{s * second:.5g}")] for size, s in curve]
    return writer.number(key, points, "beyond what any op takes", spread=writer.spread)


def cluster_text(
    name: str,
    device_file: str,
    writer: Writer,
    *,
    links: Sequence[LinkFound],
    script: ScriptHost,
    full_speed_ranks: float,
) -> str:
    """Write the profile of the cluster.

    Ranks that share cores are written with the times of a core of their own: planning divides
    them by the ranks that there are.
    """
    machine, settings = writer.machine, writer.settings
    share = full_speed_ranks / settings.processes
    lines = [
        f"format = {FORMAT}",
        f"name = {json.dumps(name)}",
        f"description = {json.dumps(writer.where)}",
        f"measured_on = {json.dumps(writer.where)}",
        f"device = {json.dumps(device_file)}",
        writer.number("gpus_per_node", settings.processes, "processes measured at once"),
    ]
    if machine.device == "cpu":
        host = "the host runs the op itself: contained in kernel_launch_us"
        lines += [
            writer.number(
                "full_speed_ranks_per_node",
                full_speed_ranks,
                "work of all ranks between collectives, beside that of one",
            ),
            writer.number("host_time_factor", 0, host, Provenance.ASSUMED),
            'traffic = "waited_for"',
        ]
        lines += ["", "[script]", *_script(script, writer)]
    names = ["inside a host"] if settings.hosts == 1 else ["inside a host", "between hosts"]
    names = names[len(names) - len(links) :]
    for index, (link_name, link) in enumerate(zip(names, links, strict=True)):
        is_last = index == len(links) - 1
        lines += [
            "",
            *_link(link_name, link, writer, None if is_last else settings.processes, share),
        ]
    return "\n".join(lines) + "\n"


def _script(script: ScriptHost, writer: Writer) -> Iterable[str]:
    how = "steps of the script's own code on small models"
    for key, value in (
        ("step_us", script.step_s * 1e6),
        ("unit_us", script.unit_s * 1e6),
        ("collective_us", script.collective_s * 1e6),
        ("tensor_us", script.tensor_s * 1e6),
        ("plain_tensor_us", script.plain_tensor_s * 1e6),
        ("message_us", script.message_s * 1e6),
        ("full_op_us", script.full_op_s * 1e6),
        ("selective_op_us", script.selective_op_s * 1e6),
        ("split_op_us", script.split_op_s * 1e6),
        ("split_collective_us", script.split_collective_s * 1e6),
        ("ns_per_element", script.element_s * GB),
    ):
        yield writer.number(key, value, how, Provenance.FITTED, spread=writer.spread)


def _link(name: str, link: LinkFound, writer: Writer, ranks: int | None, share: float) -> list[str]:
    how = f"{link.num_points} collectives and transfers, median error {link.error:.0%}"
    lines = ["[[links]]", f"name = {json.dumps(name)}"]
    if ranks is not None:
        lines.append(writer.number("ranks", ranks, "processes of a host"))
    for key, value in (
        ("peak_gb_per_s_per_gpu_unidirectional", link.values["gb_per_s"] / share),
        ("latency_us_per_hop", link.values["latency_us_per_hop"] * share),
        ("latency_us_per_collective", link.values["latency_us_per_collective"] * share),
    ):
        lines.append(writer.number(key, value, how, Provenance.FITTED, spread=link.spread))
    for key, value, why in (
        ("achieved_fraction", 1, "the rate above is the one reached"),
        ("ramp_mib_per_rank", 0, "contained in the latencies"),
        ("switch_all_reduce_fraction", 0, "no switch"),
    ):
        lines.append(writer.number(key, value, why, Provenance.ASSUMED))
    return lines
