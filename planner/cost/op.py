"""Seconds of one op on one device: a roofline whose efficiency depends on size.

    t = launch + max(compute, memory)            memory = bytes / (bandwidth * fraction of kind)

A matmul of batch x (m, k) @ (k, n) runs in waves of output tiles (tm, tn), one per SM:

    waves   = ceil(batch * ceil(m / tm) * ceil(n / tn) / num_sms)
    compute = waves * 2 tm tn (k + k_overhead) * (1 + overhead (tm + tn) / (tm tn))
              / (peak / num_sms * fraction)

with the best of the device's tiles and a fixed set-up time on top of the launch. Power limits
the rate of every matmul to a sustained share of peak. Compute and memory of a matmul overlap
imperfectly and are joined as (compute^4 + memory^4)^(1/4); so are the bytes of a pointwise kernel
and its elements, elements / rate, where it finds or casts them one by one. Everything rises with
m, n, k, bytes, elements and FLOPs, and falls with peak and bandwidth. The parameters are fitted by
``planner.cost.calibrate``.
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from planner.errors import RequestError
from planner.hardware.spec import Curve, DeviceSpec, EfficiencySpec
from planner.vocabulary import Operands

ATTENTION_CURVES = ("attention forward", "attention backward")
"""Names of the curves of fused attention; the second one's is that of backward."""

OpKind = Literal["matmul", "attention", "memory", "reduction", "embedding"]
"""matmul (and convolution), fused attention, pointwise and copies ("memory"), norms and softmax
("reduction"), row gathers and scatters ("embedding")."""

_OVERLAP_POWER = 4
"""Sharpness of the corner between a compute-bound and a memory-bound matmul."""

ROW_ALIGNMENT = 16
"""Bytes that the loads of tensor-core kernels are multiples of."""

_ATTENTION_TILE = 128
"""Rows of queries that one SM works on in fused attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpWork:
    """The work of one kernel on one rank."""

    name: str = ""
    """Of the op, by which a measured device knows it; "" where it stands for several."""
    kind: OpKind
    """What limits it."""
    flop: float
    """Floating-point operations; fused attention in full, causal or not."""
    read_bytes: float
    """Bytes read from memory."""
    write_bytes: float
    """Bytes written to memory."""
    batch: int = 1
    """Matmul: independent products. Attention: batch times heads."""
    m: int = 0
    """Matmul: rows of the result. Attention: queries. 0 where unknown."""
    n: int = 0
    """Matmul: columns of the result. Attention: keys."""
    k: int = 0
    """Matmul: length of the sums. Attention: head dim."""
    backward: bool = False
    """Attention: the backward kernel."""
    alignment_share: float = 1.0
    """Matmul: share of its rate that the alignment of its rows leaves."""
    masked_flop: float = 0.0
    """Attention: the part of ``flop`` that a causal mask spares the kernel."""
    float8: bool = False
    """Matmul: of float8, whatever the compute dtype."""
    elements: float = 0.0
    """Memory: elements that it makes; 0 where they do not tell how long it takes."""
    operands: Operands = "even"
    """Memory: how it runs through what it reads and writes."""
    is_split: bool = False
    """It runs on parts of tensors that ranks share."""


def op_s(work: OpWork, device: DeviceSpec, dtype: str) -> float:
    """Time of one op under a training load.

    Args:
        work: What it computes and moves.
        device: Where it runs.
        dtype: Compute dtype, "bfloat16".

    Returns:
        Seconds on the device, launch included.

    Raises:
        RequestError: The device does not support the dtype.
    """
    efficiency = device.efficiency
    bandwidth = device.memory_bandwidth_bytes_per_s
    num_bytes = work.read_bytes + work.write_bytes
    launch_s = device.kernel_launch_s
    curve = device.op_curves.get(curve_name(work))
    if curve is not None:
        return launch_s + _measured_s(work, curve, efficiency)
    if work.kind == "memory":
        return launch_s + pointwise_s(num_bytes, work.elements, work.operands, device)
    if work.kind == "reduction":
        return launch_s + num_bytes / (bandwidth * efficiency.reduction_bandwidth_fraction)
    if work.kind == "embedding":
        return launch_s + num_bytes / (bandwidth * efficiency.embedding_bandwidth_fraction)
    if work.kind == "attention":
        compute_s = _attention_s(work, device, dtype)
        memory_s = num_bytes / (bandwidth * efficiency.pointwise_bandwidth_fraction)
        return launch_s + max(compute_s, memory_s)
    compute_s = _matmul_s(work, device, dtype)
    memory_s = num_bytes / (bandwidth * efficiency.matmul_bandwidth_fraction)
    return launch_s + efficiency.matmul_setup_s + _joined_s(compute_s, memory_s)


def pointwise_s(num_bytes: float, elements: float, operands: Operands, device: DeviceSpec) -> float:
    """Seconds of a kernel that goes element by element, beyond its launch.

    Args:
        num_bytes: What it reads and writes.
        elements: What it makes.
        operands: Whether it finds or casts them one by one.
        device: Where it runs.
    """
    efficiency = device.efficiency
    bytes_s = num_bytes / device.pointwise_bytes_per_s
    is_cast = operands == "cast"
    rate = efficiency.cast_elements_per_s if is_cast else efficiency.strided_elements_per_s
    if operands == "even" or rate is None:
        return bytes_s
    return _joined_s(elements / rate, bytes_s)


def curve_name(work: OpWork) -> str:
    """Name of the curve of a measured device that prices an op.

    Fused attention goes by its direction and not by its kernel, of which each kind of device has
    its own.
    """
    if work.kind == "attention" and work.m:
        return ATTENTION_CURVES[work.backward]
    return work.name


def rates_rise(device: DeviceSpec) -> bool:
    """Whether n times the work takes at most n times as long for every op.

    Where nothing was measured it follows from the formulas: padding to tiles, waves and fixed times
    are divided among more. Curves may tell otherwise: small tensors lie in caches. Those of
    attention go by the dim of heads, which no batch changes.
    """
    return all(
        before_s / before >= after_s / after
        for name, curve in device.op_curves.items()
        if name not in ATTENTION_CURVES
        for (before, before_s), (after, after_s) in pairwise(curve)
    )


def _measured_s(work: OpWork, curve: Curve, efficiency: EfficiencySpec) -> float:
    """Time of an op by its measured curve; attention's is that of a score, by head dim."""
    if work.kind == "attention":
        computed = work.flop - work.masked_flop * (1 - efficiency.attention_masked_share)
        return work.batch * work.m * work.n * computed / work.flop * curve_s(curve, work.k)
    size = work.flop if work.kind == "matmul" else work.read_bytes + work.write_bytes
    return curve_s(curve, size)


def curve_s(curve: Curve, size: float) -> float:
    """Seconds on a measured curve: straight between its points, at their rates beyond them."""
    first, last = curve[0], curve[-1]
    if size <= first[0]:
        return first[1] * size / first[0]
    if size >= last[0]:
        return last[1] * size / last[0]
    place = bisect_left(curve, (size, 0.0))
    (before, before_s), (after, after_s) = curve[place - 1], curve[place]
    return before_s + (after_s - before_s) * (size - before) / (after - before)


def _joined_s(compute_s: float, memory_s: float) -> float:
    """Join two times that overlap, scaled by the larger so that nothing underflows."""
    larger_s = max(compute_s, memory_s)
    if larger_s == 0:
        return 0.0
    ratio = min(compute_s, memory_s) / larger_s
    return float(larger_s * (1 + ratio**_OVERLAP_POWER) ** (1 / _OVERLAP_POWER))


def _peak(device: DeviceSpec, dtype: str) -> float:
    """Datasheet FLOP/s."""
    peak = device.peak_flop_per_s.get(dtype)
    if peak is None:
        raise RequestError(
            f"device {device.name!r} has no {dtype} matmul",
            hint=f"it supports {', '.join(device.peak_flop_per_s)}",
        )
    return peak


def _matmul_s(work: OpWork, device: DeviceSpec, dtype: str) -> float:
    """Compute time of a matmul, by waves of tiles where its shape is known."""
    efficiency = device.efficiency
    peak = (
        device.float8_flop_per_s if work.float8 else _peak(device, dtype)
    ) * work.alignment_share
    sustained_fraction = (
        efficiency.float8_sustained_fraction if work.float8 else efficiency.sustained_fraction
    )
    sustained_s = work.flop / (peak * sustained_fraction)
    exact_flop = 2 * work.batch * work.m * work.n * work.k
    if exact_flop == 0:
        return max(sustained_s, work.flop / (peak * efficiency.matmul_fraction))
    padded_flop = _padded_flop(work.batch, work.m, work.n, work.k, device.num_sms, efficiency)
    # An op whose FLOPs differ from 2 m n k (a grouped convolution) keeps its own count.
    padded_s = padded_flop * (work.flop / exact_flop) / (peak * efficiency.matmul_fraction)
    return max(sustained_s, padded_s)


@lru_cache(maxsize=65536)
def _padded_flop(  # the six numbers that the tiling depends on
    batch: int, m: int, n: int, k: int, num_sms: int, efficiency: EfficiencySpec
) -> float:
    """Work of a matmul with idle SMs, padded tiles and tile overheads counted in, FLOPs."""
    least = float("inf")
    overhead = efficiency.matmul_tile_overhead
    for tile_m, tile_n in efficiency.matmul_tiles:
        area = tile_m * tile_n
        tiles = batch * -(-m // tile_m) * -(-n // tile_n)
        waves = -(-tiles // num_sms)
        least = min(least, waves * (area + overhead * (tile_m + tile_n)))
    return 2 * least * num_sms * (k + efficiency.matmul_k_overhead)


def _attention_s(work: OpWork, device: DeviceSpec, dtype: str) -> float:
    """Compute time of fused attention; few heads and short sequences leave SMs idle.

    The shares of peak are those of long sequences: filling the pipeline and writing the result
    take a tile of queries as long as some more keys would.
    """
    efficiency = device.efficiency
    fraction = (
        efficiency.attention_backward_fraction
        if work.backward
        else efficiency.attention_forward_fraction
    )
    computed = work.flop - work.masked_flop * (1 - efficiency.attention_masked_share)
    seconds = computed / (_peak(device, dtype) * fraction)
    if not work.m or not work.flop:
        return seconds
    seconds *= 1 + efficiency.attention_fill_keys / (work.n * computed / work.flop)
    seconds *= 1 + efficiency.attention_head_overhead / work.k
    tiles = work.batch * -(-work.m // _ATTENTION_TILE)
    return seconds * max(1.0, device.num_sms / tiles)
