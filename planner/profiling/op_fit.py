"""The numbers of a device from its measured ops."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.cost.device_fit import fit_efficiency, price_op, with_efficiency
from planner.cost.op import ATTENTION_CURVES, OpWork, curve_name, op_s
from planner.cost.tables import OpSample
from planner.cost.work import op_kind
from planner.graph.analysis.causal import masked_pairs
from planner.hardware.spec import ATTENTION_FILL_KEYS, Curve, DeviceSpec, EfficiencySpec
from planner.profiling.points import Machine, Point
from planner.vocabulary import Dtype

LEAST_CALL_S = 1e-7

_STREAMS = ("add", "mul")
"""Ops that do hardly anything but read and write."""

_START = EfficiencySpec(
    matmul_fraction=1.0,
    matmul_tiles=((16, 16),),
    matmul_tile_overhead=1.0,
    matmul_k_overhead=8.0,
    matmul_setup_s=1e-6,
    matmul_bandwidth_fraction=0.5,
    pointwise_bandwidth_fraction=0.5,
    reduction_bandwidth_fraction=0.3,
    embedding_bandwidth_fraction=0.3,
    attention_forward_fraction=0.5,
    attention_backward_fraction=0.5,
    sustained_fraction=1.0,
    attention_fill_keys=0.0,
    attention_head_overhead=0.0,
    attention_masked_share=1.0,
)
"""Where the search begins on a CPU: register tiles of its matrix library, one core."""


_START_OF_GPUS = replace(
    _START,
    matmul_tiles=((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64)),
    matmul_tile_overhead=20.0,
    matmul_k_overhead=50.0,
    matmul_setup_s=3e-6,
    attention_fill_keys=ATTENTION_FILL_KEYS,
    attention_head_overhead=0.0,
    attention_masked_share=0.0,
)
"""On a GPU: usual tiles of matmul libraries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFit:
    """What was found of a device."""

    device: DeviceSpec
    """With the numbers put in."""
    errors: Mapping[str, float]
    """Median of |predicted / measured - 1| by kind of op."""
    spread: float
    """Median of the 90th over the 10th percentile of the repeats of an op."""


def fit_device(machine: Machine, points: Sequence[Point]) -> DeviceFit:
    """Find the numbers of a device; times are of a rank that has a core of its own."""
    rows = [row for point in points if point["kind"] == "op" for row in point["rows"]]
    if machine.device != "cpu":
        return _fit_gpu(machine, rows)
    overhead = next(point for point in points if point["kind"] == "overhead")
    call_s = min(row["seconds"] for row in rows if row["kernel"] == "add")
    samples = [_sample(row, call_s) for row in rows]
    peaks = _peaks(samples)
    device = DeviceSpec(
        name="measured",
        memory_bytes=machine.memory_bytes,
        reserve_bytes=0,
        peak_flop_per_s=peaks,
        memory_bandwidth_bytes_per_s=_bandwidth(samples),
        num_sms=machine.num_sms,
        kernel_launch_s=0.0,
        efficiency=_START,
        op_curves=_curves(samples),
        numbers={},
    )
    device = _with_efficiency(device, samples)
    device = replace(device, kernel_launch_s=launch_s(device, overhead))
    bare = replace(device, kernel_launch_s=0.0)
    return DeviceFit(device=device, errors=_errors(bare, samples), spread=_spread(rows))


def _fit_gpu(machine: Machine, rows: Sequence[Mapping[str, Any]]) -> DeviceFit:
    """Fit the shares of a GPU, whose host's time is none of the kernels'."""
    samples = [_sample(row, 0.0) for row in rows]
    device = DeviceSpec(
        name="measured",
        memory_bytes=machine.memory_bytes,
        reserve_bytes=0,
        peak_flop_per_s=_peaks(samples),
        memory_bandwidth_bytes_per_s=_bandwidth(samples),
        num_sms=machine.num_sms,
        kernel_launch_s=2e-6,
        efficiency=_START_OF_GPUS,
        numbers={},
    )
    device = with_efficiency(device, fit_efficiency(device, samples))
    return DeviceFit(device=device, errors=_errors(device, samples), spread=_spread(rows))


def works_of(rows: Iterable[Mapping[str, Any]]) -> list[OpWork]:
    """The work of captured calls."""
    return [_work(row) for row in rows]


def launch_s(device: DeviceSpec, point: Point) -> float:
    """What an op takes beyond its work, autograd and the modules around it included."""
    works = works_of(point["calls"])
    bare_s = sum(op_s(work, device, Dtype.FLOAT32) for work in works)
    return float(max(LEAST_CALL_S, (point["seconds"] - bare_s) / len(works)))


def _sample(row: Mapping[str, Any], call_s: float) -> OpSample:
    """An op without what any call takes."""
    seconds = max(row["seconds"] - call_s, 0.05 * row["seconds"], LEAST_CALL_S)
    return OpSample(
        table="measured",
        gpu="measured",
        group=f"{op_kind(row['kernel'])} {row['phase']}",
        works=(_work(row),),
        dtype=row["dtype"],
        measured_s=seconds,
    )


def _work(row: Mapping[str, Any]) -> OpWork:
    flop, m, n = row["flop"], row["m"], row["n"]
    hidden = flop // (m * n) * masked_pairs(m, n) if row["causal"] else 0
    return OpWork(
        name=row["kernel"],
        kind=op_kind(row["kernel"]),
        flop=flop,
        masked_flop=hidden,
        read_bytes=row["read_bytes"],
        write_bytes=row["write_bytes"],
        batch=row["batch"],
        m=m,
        n=n,
        k=row["k"],
        backward=row["phase"] == "backward" or row["kernel"].endswith("_backward"),
    )


def _peaks(samples: Sequence[OpSample]) -> dict[str, float]:
    """The best rate of matrix products by dtype."""
    found: dict[str, float] = defaultdict(float)
    for sample in samples:
        (work,) = sample.works
        if work.kind == "matmul" and work.m:
            found[sample.dtype] = max(found[sample.dtype], work.flop / sample.measured_s)
    return dict(found)


def _bytes(sample: OpSample) -> float:
    (work,) = sample.works
    return work.read_bytes + work.write_bytes


def _bandwidth(samples: Sequence[OpSample]) -> float:
    """The best rate of an op on the largest operands."""
    memory = [sample for sample in samples if sample.works[0].name in _STREAMS]
    largest = max(_bytes(sample) for sample in memory)
    return max(_bytes(s) / s.measured_s for s in memory if _bytes(s) >= largest / 4)


def _curves(samples: Sequence[OpSample]) -> dict[str, Curve]:
    """Seconds by size of every op that is not priced by its shape."""
    found: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        (work,) = sample.works
        if work.kind == "attention":
            scores = work.batch * work.m * work.n
            found[curve_name(work)][work.k].append(sample.measured_s / scores)
        elif not work.m:
            size = work.flop if work.kind == "matmul" else _bytes(sample)
            if size:
                found[work.name][size].append(sample.measured_s)
    curves = {}
    for name, by_size in found.items():
        points = [(size, statistics.median(seconds)) for size, seconds in sorted(by_size.items())]
        if op_kind(name) == "matmul":  # shapes differ at equal FLOPs: one rate for all
            rates = [size / seconds for size, seconds in points]
            points = [(points[-1][0], points[-1][0] / statistics.median(rates))]
        curves[name] = tuple(points) if name in ATTENTION_CURVES else _rising(points)
    return curves


def _rising(points: Sequence[tuple[float, float]]) -> Curve:
    """No point below the one before it, which noise can make of it."""
    highest, found = 0.0, []
    for size, seconds in points:
        highest = max(highest, seconds)
        found.append((size, highest))
    return tuple(found)


def _with_efficiency(device: DeviceSpec, samples: Sequence[OpSample]) -> DeviceSpec:
    """Fit the shares of what is priced by its shape; the others stand for ops without a curve."""
    peak = device.peak_flop_per_s[Dtype.FLOAT32]
    efficiency = replace(
        device.efficiency,
        pointwise_bandwidth_fraction=_share(device, "memory"),
        reduction_bandwidth_fraction=_share(device, "reduction"),
        embedding_bandwidth_fraction=_share(device, "embedding"),
        attention_forward_fraction=_attention_rate(samples, backward=False) / peak,
        attention_backward_fraction=_attention_rate(samples, backward=True) / peak,
    )
    device = replace(device, efficiency=efficiency)
    products = [s for s in samples if s.works[0].kind == "matmul" and s.works[0].m]
    in_float32 = [sample for sample in products if sample.dtype == Dtype.FLOAT32]
    found = fit_efficiency(
        device,
        in_float32,
        fixed=("kernel_launch_us", "sustained_fraction_of_peak"),
    )
    return with_efficiency(device, found)


def _share(device: DeviceSpec, kind: str) -> float:
    """The middle rate of the ops of a kind, at their largest operands."""
    ends = [curve[-1] for name, curve in device.op_curves.items() if op_kind(name) == kind]
    rates = [size / seconds for size, seconds in ends]
    return min(1.0, statistics.median(rates) / device.memory_bandwidth_bytes_per_s)


def _attention_rate(samples: Sequence[OpSample], *, backward: bool) -> float:
    """The middle rate of attention, FLOP/s."""
    works = [(sample.works[0], sample.measured_s) for sample in samples]
    return statistics.median(
        work.flop / seconds
        for work, seconds in works
        if work.kind == "attention" and work.backward == backward
    )


def _errors(device: DeviceSpec, samples: Sequence[OpSample]) -> dict[str, float]:
    """How well the device prices what it was fitted to."""
    found: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.dtype == Dtype.FLOAT32:
            error = abs(price_op(sample, device) / sample.measured_s - 1)
            found[sample.works[0].kind].append(error)
    return {kind: statistics.median(errors) for kind, errors in found.items()}


def _spread(rows: Sequence[Mapping[str, Any]]) -> float:
    return float(
        statistics.median(row["seconds_p90"] / max(row["seconds_p10"], 1e-9) for row in rows)
    )
