"""How many units ranks of several stages can hold in a step below a limit, at the most generous.

The memory of a rank is given a price instead of a limit (Lagrange): for any price y >= 0 of a byte
at a moment of the schedule, a choice of columns that fits takes along a path at least

    seconds + y (bytes - room),

and what is on the left of that falls apart into stages. So the least of it over all choices with
some number of units in all is found stage by stage, and a number whose least exceeds the limit, at
any price, moment and path, is not possible. It is a few array operations for all ranks, where
listing what fits takes tens of thousands of choices (``holdings``); and it decides nearly as much,
since lengths are exact and only the recomputation of one stage would be mixed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_PRICES = 3
"""Prices of memory that are tried, between the least and the most that a stage would pay."""

_ROUNDING = 1e-9
"""Room that is given away, so that no rounding takes any."""

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChoices:
    """What the stages at one place of some ranks can be, columns that all of them choose from."""

    lengths: NDArray[np.intp]
    """Units: (column)."""
    seconds: Floats
    """Along each path: (rank, column, path)."""
    sizes: Floats
    """Bytes at each moment: (rank, column, moment)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PossibleUnits:
    """Numbers of units that ranks may hold."""

    fewest: int
    """The least that columns have."""
    more: Flags
    """Whether a rank may hold that and so many more: (units, rank)."""

    def of(self, rank: int) -> list[int]:
        """Those of one rank."""
        return [self.fewest + int(more) for more in np.flatnonzero(self.more[:, rank])]


def possible_units(
    stages: Sequence[StageChoices], *, most_s: Floats, room_bytes: float
) -> PossibleUnits:
    """Numbers of units that ranks may hold; no other number can be held in time and memory.

    Args:
        stages: The ranks' stages, in model order.
        most_s: Longest time along each path: (rank, path).
        room_bytes: Room of a rank.
    """
    prices = _prices(stages)
    least = _by_length(stages[0], prices)
    for stage in stages[1:]:
        least = _added(least, _by_length(stage, prices))
    paid = room_bytes * prices[:, None, None] * (1 + _ROUNDING)
    more: Flags = np.all(least - paid <= most_s[..., None, None], axis=(2, 3, 4))
    return PossibleUnits(fewest=sum(int(stage.lengths.min()) for stage in stages), more=more)


def _prices(stages: Sequence[StageChoices]) -> Floats:
    """Seconds that a byte may be worth: none, and what recomputation pays in a rank's stages."""
    rates = np.array([_rates(stage) for stage in stages])
    rates[rates <= np.finfo(float).tiny] = np.nan  # what is less has no geometric sequence
    pays = ~np.isnan(rates).all(axis=0)
    prices = np.zeros((len(pays), 1 + _PRICES))
    least, most = np.nanmin(rates[:, pays], axis=0), np.nanmax(rates[:, pays], axis=0)
    prices[pays, 1:] = np.geomspace(least / 1.5, most * 1.5, _PRICES, axis=1)
    return prices


def _rates(stage: StageChoices) -> Floats:
    """Seconds per byte that the recomputation of columns of one length frees, by rank."""
    alike = stage.lengths == stage.lengths[len(stage.lengths) // 2]
    freed = np.ptp(stage.sizes[:, alike].max(axis=2), axis=1)
    seconds = np.ptp(stage.seconds[:, alike, 0], axis=1)
    frees = freed >= 1.0  # less is no byte
    rates: Floats = np.divide(seconds, freed, out=np.zeros(len(freed)), where=frees)
    return rates


def _by_length(stage: StageChoices, prices: Floats) -> Floats:
    """The least of a stage for each of its lengths, from the shortest on."""
    paid = stage.sizes[:, :, None, :, None] * prices[:, None, None, None]
    cost = stage.seconds[..., None, None] + paid
    beyond = stage.lengths - stage.lengths.min()
    least = np.full((int(beyond.max()) + 1, len(cost), *cost.shape[2:]), np.inf)
    for length in range(len(least)):
        if (alike := beyond == length).any():
            least[length] = cost[:, alike].min(axis=1)
    return least


def _added(one: Floats, other: Floats) -> Floats:
    """The least of two runs of stages together for each sum of their lengths."""
    least = np.full((len(one) + len(other) - 1, *one.shape[1:]), np.inf)
    for length, cost in enumerate(other):
        part = least[length : length + len(one)]
        np.minimum(part, one + cost, out=part)
    return least
