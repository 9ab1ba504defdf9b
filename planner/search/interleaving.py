"""Configurations whose ranks hold several stages: a bound without an ILP.

The bound relaxes the ILP. All ranks together hold at least what the model keeps with the cheapest
recomputation that lets their summed memory fit, a knapsack that may be filled in fractions; its
time is part of every backward. Preconditions: stages lie within REACH_UNITS of their even share
(the searched set); a rank's memory is at least the mean over its fullest moments.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.search.bounds import least_s
from planner.search.configuration_search import REACH_UNITS, ConfigurationSearch
from planner.vocabulary import Recomputation

Floats = NDArray[np.float64]
StageRanges = tuple[NDArray[np.intp], NDArray[np.intp]]
"""By unit: the first of some stages, and one past the last."""


def sharpen(search: ConfigurationSearch) -> None:
    """Raise ``search.bound_s`` by even shares and by the recomputation that memory asks for."""
    recompute_s = _recompute_s(search)
    if recompute_s is None:
        search.bound_s = float("inf")
        return
    share_s = max(0.0, search.even_s - REACH_UNITS * search.unit_s)
    forward, backward = _least_shares(search)
    forward_s, input_s, weight_s = search.parts_s
    bound_s = least_s(
        search.configuration,
        parts_s=(forward_s, input_s + recompute_s, weight_s),
        least_parts_s=(share_s * forward, share_s * backward, 0.0),
        transfers_s=search.transfers_s,
    )
    search.bound_s = max(search.bound_s, search.once_s + bound_s)


def _least_shares(search: ConfigurationSearch) -> tuple[float, float]:
    """Least share of forward and of backward in the time of any unit.

    Of divided backwards, the share of the part that other stages wait for.
    """
    whole_s, forward_s, weight_s = (
        np.diff(search.table.before(name)) for name in ("least", "least_forward", "least_weight")
    )
    backward_s = whole_s - forward_s - search.configuration.divides_backward * weight_s
    takes = whole_s > 0
    forward, backward = (part_s[takes] / whole_s[takes] for part_s in (forward_s, backward_s))
    return float(forward.min(initial=1.0)), float(backward.min(initial=1.0))


def _recompute_s(search: ConfigurationSearch) -> float | None:
    """Least recomputation of a microbatch, all stages together; None where none is enough.

    A unit is counted for as many microbatches as the stages hold at the least in which it may lie,
    and so is what it keeps under each recomputation.
    """
    configuration, units, memory = search.configuration, search.table.units, search.table.memory
    counts, gradients = configuration.mean_starts
    stages = _possible_stages(search)
    least = _least_of(counts, stages)
    needed = memory.least_static_bytes() + _least_gradients(search, gradients, stages)
    sent = sorted(search.priced.model.entering_bytes[p] for p in search.positions[1:-1])
    needed += 2 * configuration.num_microbatches * sum(sent[: configuration.num_stages - 1])
    # What lies in these buffers is no activation: of the first unit of all stages but one.
    buffered = [memory.buffers.most_bytes(index) for index in range(1, search.num_units)]
    received = np.array(buffered) * least[1:]
    needed -= sum(np.sort(received)[1 - configuration.num_stages :].tolist())
    needed += sum(
        units[i].activation_bytes[Recomputation.NONE] * float(least[i])
        for i in (0, search.num_units - 1)
    )
    fastest, steps = _blocks(search)
    fixed_s = sum(fastest[:, 0].tolist())
    needed = sum((fastest[:, 1] * least[1:-1]).tolist(), start=needed)
    seconds, sizes = steps[..., 0], steps[..., 1] * least[1:-1, None]
    seconds, sizes = seconds[sizes > 0], sizes[sizes > 0]
    order = np.argsort(seconds / sizes, kind="stable")
    short = needed - configuration.degrees.pp * search.room_bytes
    for step_s, size in zip(seconds[order].tolist(), sizes[order].tolist(), strict=True):
        if short <= 0:
            break
        share = min(1.0, short / size)
        fixed_s += share * step_s
        short -= share * size
    return fixed_s if short <= 0 else None


def _blocks(search: ConfigurationSearch) -> tuple[Floats, Floats]:
    """Seconds and kept bytes of each block's fastest recomputation, and steps from there on.

    Those are of ``_cheapest_first``, filled up with such that free nothing.
    """
    kinds, of_block = np.unique(search.priced.model.first_alike[1:-1], return_inverse=True)
    choices = [_choices(search, index) for index in kinds.tolist()]
    fastest = np.array([min(each) for each in choices]).reshape(-1, 2)
    steps = np.zeros((len(kinds), len(search.maker.kinds) - 1, 2))
    for at, each in enumerate(choices):
        for place, step in enumerate(_cheapest_first(each)):
            steps[at, place] = step
    return fastest[of_block], steps[of_block]


def _least_gradients(
    search: ConfigurationSearch, shares: Sequence[float], stages: StageRanges
) -> float:
    """Gradients of earlier backwards that all stages hold on the mean, at the least.

    Weights that several units read are counted for the stage that holds them least.
    """
    memory, model, least = search.table.memory, search.priced.model, min(shares)
    tied = {unit for each in model.tied for unit in each.units}
    known: dict[int, float] = {}
    total = least * memory.gradient_bytes(0, search.num_units)
    more = (_least_of(shares, stages) - least).tolist()
    for index in range(1, search.num_units - 1):
        if more[index] and index not in tied:
            unit = model.first_alike[index]
            if unit not in known:
                known[unit] = memory.gradient_bytes(index, index + 1)
            total += more[index] * known[unit]
    return total


def _possible_stages(search: ConfigurationSearch) -> StageRanges:
    """The first of the stages that each unit may lie in, and one past the last.

    A unit that begins after some share of the model lies in a stage whose place in the model is
    near to that, since stages are near to even. The first unit lies in the first, the last in the
    last.
    """
    slack_s, last = REACH_UNITS * search.unit_s, search.configuration.num_stages - 1
    longest_s, shortest_s = search.even_s + slack_s, search.even_s - slack_s
    least_s = search.table.before("least")
    before_s, rest_s = least_s[1:-2], (least_s[-1] - least_s)[2:-1]
    earliest, latest = np.zeros(len(before_s), dtype=int), np.full(len(before_s), last)
    if shortest_s > 0:
        latest = np.minimum(latest, (before_s / shortest_s).astype(int) + 1)
    if longest_s > 0:
        earliest = np.maximum(0, (before_s / longest_s).astype(int) - 1)
        fewest = np.maximum(0.0, rest_s / longest_s - 1).astype(int)
        latest = np.minimum(latest, last - fewest)
    return np.array([0, *earliest, last]), np.array([1, *(latest + 1), last + 1])


def _least_of(values: Sequence[float], stages: StageRanges) -> Floats:
    """The least value of the stages that each unit may lie in."""
    ends = np.column_stack(stages).ravel()
    least: Floats = np.minimum.reduceat([*values, np.inf], ends)[::2]
    return least


def _cheapest_first(choices: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Steps of a unit's recomputation: seconds, and bytes of a microbatch that each frees.

    The lower convex hull of its kinds, so that a fraction of a step is never cheaper than it.
    """
    hull: list[tuple[float, float]] = []
    for point in sorted(choices):
        if hull and point[1] >= hull[-1][1]:
            continue
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return [(after[0] - before[0], before[1] - after[1]) for before, after in pairwise(hull)]


def _choices(search: ConfigurationSearch, index: int) -> list[tuple[float, float]]:
    """Seconds and kept bytes of a unit under each recomputation."""
    kept_bytes = search.table.units[index].activation_bytes
    return [
        (search.table.recompute_s(index, kind), float(kept_bytes[kind]))
        for kind in search.maker.kinds
    ]


def _is_above(
    left: tuple[float, float], middle: tuple[float, float], right: tuple[float, float]
) -> bool:
    """Whether the middle point lies on or above the line from left to right."""
    return (middle[1] - left[1]) * (right[0] - left[0]) >= (right[1] - left[1]) * (
        middle[0] - left[0]
    )
