"""How many units a rank of several stages can hold in a step below a limit, at the most generous.

The memory of a rank is given a price instead of a limit (Lagrange): for any price y >= 0 of a byte
at a moment of the schedule, a choice of columns that fits takes along a path at least

    seconds + y (bytes - room),

and what is on the left of that falls apart into stages. So the least of it over all choices with
some number of units in all is found stage by stage, and a number whose least exceeds the limit, at
any price, moment and path, is not possible. It is a few array operations for a rank, where listing
what fits takes tens of thousands of choices (``holdings``); and it decides nearly as much, since
lengths are exact and only the recomputation of one stage would be mixed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_PRICES = 3
"""Prices of memory that are tried, between the least and the most that a stage would pay."""
_MOST_MOMENTS = 4
"""Moments that are tried beside the mean of all."""

_ROUNDING = 1e-9
"""Room that is given away, so that no rounding takes any."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChoices:
    """What one stage of a rank can be, a row for each column."""

    lengths: NDArray[np.intp]
    """Units."""
    seconds: Floats
    """Along each path."""
    sizes: Floats
    """Bytes at each moment."""


def possible_units(
    stages: Sequence[StageChoices], *, most_s: Floats, room_bytes: Floats
) -> Iterator[int]:
    """Numbers of units that a rank may hold; no other number can be held in time and memory.

    Args:
        stages: The rank's stages.
        most_s: Longest time along each path.
        room_bytes: Room at each moment.
    """
    prices = _prices(stages)
    room_bytes = _some(room_bytes[None])[0]
    units, least = 0, np.zeros((1, len(most_s), len(room_bytes), len(prices)))
    for stage in stages:
        units += int(stage.lengths.min())
        least = _added(least, _by_length(stage, prices))
    paid = least - room_bytes[:, None] * prices * (1 + _ROUNDING)
    possible = (paid <= most_s[:, None, None]).all(axis=(1, 2, 3))
    yield from (units + np.flatnonzero(possible)).tolist()


def _prices(stages: Sequence[StageChoices]) -> Floats:
    """Seconds that a byte may be worth: none, and what recomputation pays in these stages."""
    paid: list[float] = []
    for stage in stages:
        alike = stage.lengths == stage.lengths[len(stage.lengths) // 2]
        freed, seconds = np.ptp(stage.sizes[alike].max(axis=1)), np.ptp(stage.seconds[alike, 0])
        rate = float(seconds / freed) if freed > 0 else 0.0
        if rate > np.finfo(float).tiny:  # what is less has no geometric sequence
            paid.append(rate)
    if not paid:
        return np.zeros(1)
    return np.array([0.0, *np.geomspace(min(paid) / 1.5, max(paid) * 1.5, _PRICES)])


def _some(by_moment: Floats) -> Floats:
    """The mean over the moments, and some of these."""
    step = -(-by_moment.shape[1] // _MOST_MOMENTS)
    return np.column_stack([by_moment.mean(axis=1), by_moment[:, ::step]])


def _by_length(stage: StageChoices, prices: Floats) -> Floats:
    """The least of a stage for each of its lengths, from the shortest on."""
    sizes = _some(stage.sizes)
    cost = stage.seconds[:, :, None, None] + sizes[:, None, :, None] * prices
    beyond = stage.lengths - stage.lengths.min()
    least = np.full((int(beyond.max()) + 1, *cost.shape[1:]), np.inf)
    for length in range(len(least)):
        if (alike := beyond == length).any():
            least[length] = cost[alike].min(axis=0)
    return least


def _added(one: Floats, other: Floats) -> Floats:
    """The least of two runs of stages together for each sum of their lengths."""
    least = np.full((len(one) + len(other) - 1, *one.shape[1:]), np.inf)
    for length, cost in enumerate(other):
        part = least[length : length + len(one)]
        np.minimum(part, one + cost, out=part)
    return least
