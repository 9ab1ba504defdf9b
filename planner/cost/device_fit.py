"""Fitting the efficiency numbers of one device to measured ops."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from planner.cost.op import op_s
from planner.cost.pattern_search import pattern_search
from planner.cost.tables import OpSample
from planner.hardware.spec import DeviceSpec
from planner.units import us_to_s

_FRACTIONS = {
    "matmul_fraction_of_peak": ("matmul", "matmul_fraction"),
    "sustained_fraction_of_peak": ("matmul", "sustained_fraction"),
    "matmul_tile_overhead_elements": ("matmul", "matmul_tile_overhead"),
    "matmul_k_overhead_elements": ("matmul", "matmul_k_overhead"),
    "matmul_fraction_of_bandwidth": ("matmul", "matmul_bandwidth_fraction"),
    "pointwise_fraction_of_bandwidth": ("memory", "pointwise_bandwidth_fraction"),
    "reduction_fraction_of_bandwidth": ("reduction", "reduction_bandwidth_fraction"),
    "embedding_fraction_of_bandwidth": ("embedding", "embedding_bandwidth_fraction"),
    "attention_forward_fraction_of_peak": ("attention", "attention_forward_fraction"),
    "attention_backward_fraction_of_peak": ("attention", "attention_backward_fraction"),
}
"""Fitted numbers by their keys in the profile: the kind of op that shows them, and their field of
``EfficiencySpec``."""

_SETUP = "matmul_setup_us"
_LAUNCH = "kernel_launch_us"

_MOST_STREAMED = 0.92
"""Share of datasheet bandwidth that stream benchmarks reach; what repeats faster is in cache."""


def price_op(sample: OpSample, device: DeviceSpec) -> float:
    """Predict the time of a measured op, seconds."""
    return sum(op_s(work, device, sample.dtype) for work in sample.works)


def fit_efficiency(
    device: DeviceSpec, samples: Sequence[OpSample], *, fixed: Sequence[str] = ()
) -> dict[str, float]:
    """Search the efficiency numbers that the samples show; each group of them weighs the same.

    Args:
        device: Where the search starts.
        samples: Ops that were measured on it.
        fixed: Keys that keep the device's values.

    Returns:
        What was searched, by the keys of the profile.
    """
    groups: dict[str, list[OpSample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)

    def loss(values: Mapping[str, float]) -> float:
        changed = with_efficiency(device, values)
        return statistics.fmean(
            mean_log_error((price_op(each, changed), each.measured_s) for each in group)
            for group in groups.values()
        )

    kinds = {work.kind for sample in samples for work in sample.works}
    start = {key: value for key, value in _values(device, kinds).items() if key not in fixed}
    return pattern_search(loss, start, most=bounded_shares(start))


def _values(device: DeviceSpec, kinds: Set[str]) -> dict[str, float]:
    """The device's values of all that some kinds of op show."""
    efficiency = device.efficiency
    values = {_LAUNCH: device.kernel_launch_s * 1e6}
    if "matmul" in kinds:
        values[_SETUP] = efficiency.matmul_setup_s * 1e6
    for key, (kind, field) in _FRACTIONS.items():
        if kind in kinds:
            values[key] = getattr(efficiency, field)
    return values


def with_efficiency(device: DeviceSpec, values: Mapping[str, float]) -> DeviceSpec:
    """The device with other numbers, by the keys of the profile."""
    fields: dict[str, Any] = {
        field: values[key] for key, (_, field) in _FRACTIONS.items() if key in values
    }
    if _SETUP in values:
        fields["matmul_setup_s"] = us_to_s(values[_SETUP])
    launch_s = us_to_s(values[_LAUNCH]) if _LAUNCH in values else device.kernel_launch_s
    return replace(
        device, kernel_launch_s=launch_s, efficiency=replace(device.efficiency, **fields)
    )


def bounded_shares(names: Iterable[str]) -> dict[str, float]:
    """Largest values of the parameters that are shares."""
    most = {name: 1.0 for name in names if "fraction" in name}
    if "pointwise_fraction_of_bandwidth" in most:
        most["pointwise_fraction_of_bandwidth"] = _MOST_STREAMED
    return most


def mean_log_error(pairs: Iterable[tuple[float, float]]) -> float:
    """Mean of |log(predicted / measured)|."""
    return statistics.fmean(abs(math.log(predicted / measured)) for predicted, measured in pairs)
