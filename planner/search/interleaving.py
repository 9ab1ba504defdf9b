"""Configurations whose ranks hold several stages: a bound without an ILP.

The bound relaxes the ILP. All ranks together hold at least what the model keeps with the cheapest
recomputation that lets their summed memory fit, a knapsack that may be filled in fractions; its
time is part of every backward. Preconditions: stages lie within REACH_UNITS of their even share
(the searched set); a rank's memory is at least the mean over its fullest moments.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from planner.search.bounds import least_s
from planner.search.configuration_search import REACH_UNITS, ConfigurationSearch
from planner.vocabulary import Recomputation


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
    forward, backward = [1.0], [1.0]
    for unit in range(search.num_units):
        whole_s = search.least_s(unit, unit + 1)
        if whole_s > 0:
            forward_s, backward_s, _ = search.least_parts_s(unit, unit + 1)
            forward.append(forward_s / whole_s)
            backward.append(backward_s / whole_s)
    return min(forward), min(backward)


def _recompute_s(search: ConfigurationSearch) -> float | None:
    """Least recomputation of a microbatch, all stages together; None where none is enough.

    A unit is counted for as many microbatches as the stages hold at the least in which it may lie,
    and so is what it keeps under each recomputation.
    """
    configuration, units, memory = search.configuration, search.table.units, search.table.memory
    counts, gradients = configuration.mean_starts
    stages = _possible_stages(search)
    least = [min(counts[each]) for each in stages]
    needed = memory.least_static_bytes() + _least_gradients(search, gradients, stages)
    sent = sorted(search.priced.model.entering_bytes[p] for p in search.positions[1:-1])
    needed += 2 * configuration.num_microbatches * sum(sent[: configuration.num_stages - 1])
    # What lies in these buffers is no activation: of the first unit of all stages but one.
    received = [memory.received_bytes(i) * least[i] for i in range(1, search.num_units)]
    needed -= sum(sorted(received)[1 - configuration.num_stages :])
    needed += sum(
        units[i].activation_bytes[Recomputation.NONE] * least[i] for i in (0, search.num_units - 1)
    )
    freed: list[tuple[float, float]] = []
    fixed_s, first_block = 0.0, search.priced.model.blocks.start
    known: dict[tuple[int, bool], tuple[tuple[float, float], list[tuple[float, float]]]] = {}
    for index in range(1, search.num_units - 1):
        key = (id(units[index]), index == first_block)  # nothing hides behind the first block
        if key not in known:
            choices = _choices(search, index)
            known[key] = min(choices), _cheapest_first(choices)
        (fastest_s, most_bytes), steps = known[key]
        fixed_s += fastest_s
        needed += most_bytes * least[index]
        freed += [(seconds, size * least[index]) for seconds, size in steps if least[index]]
    short = needed - configuration.degrees.pp * search.room_bytes
    for seconds, size in sorted(freed, key=lambda item: item[0] / item[1]):
        if short <= 0:
            break
        share = min(1.0, short / size)
        fixed_s += share * seconds
        short -= share * size
    return fixed_s if short <= 0 else None


def _least_gradients(
    search: ConfigurationSearch, shares: Sequence[float], stages: Sequence[slice]
) -> float:
    """Gradients of earlier backwards that all stages hold on the mean, at the least.

    Weights that several units read are counted for the stage that holds them least.
    """
    memory, units, least = search.table.memory, search.table.units, min(shares)
    tied = {unit for each in search.priced.model.tied for unit in each.units}
    known: dict[int, float] = {}
    total = least * memory.gradient_bytes(0, search.num_units)
    for index in range(1, search.num_units - 1):
        more = min(shares[stages[index]]) - least
        if more and index not in tied:
            unit = id(units[index])
            if unit not in known:
                known[unit] = memory.gradient_bytes(index, index + 1)
            total += more * known[unit]
    return total


def _possible_stages(search: ConfigurationSearch) -> list[slice]:
    """The stages that each unit may lie in.

    A unit that begins after some share of the model lies in a stage whose place in the model is
    near to that, since stages are near to even. The first unit lies in the first, the last in the
    last.
    """
    slack_s, last = REACH_UNITS * search.unit_s, search.configuration.num_stages - 1
    longest_s, shortest_s = search.even_s + slack_s, search.even_s - slack_s
    inner = range(1, search.num_units - 1)
    before_s = np.array([search.least_s(0, index) for index in inner])
    rest_s = np.array([search.least_s(index + 1, search.num_units) for index in inner])
    earliest, latest = np.zeros(len(inner), dtype=int), np.full(len(inner), last)
    if shortest_s > 0:
        latest = np.minimum(latest, (before_s / shortest_s).astype(int) + 1)
    if longest_s > 0:
        earliest = np.maximum(0, (before_s / longest_s).astype(int) - 1)
        fewest = np.maximum(0.0, rest_s / longest_s - 1).astype(int)
        latest = np.minimum(latest, last - fewest)
    between = map(slice, earliest.tolist(), (latest + 1).tolist())
    return [slice(0, 1), *between, slice(last, last + 1)]


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
