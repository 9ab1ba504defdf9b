"""Choices of recomputation for alike blocks, without those that another beats.

Only counts per kind matter, so that a choice is a point: its seconds, kept bytes and transients.
"""

from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.vocabulary import RECOMPUTATIONS

Highest = tuple[tuple[int, int], ...]
"""Highest transients by recomputation, when a backward starts and when it ends."""
Kind = tuple[str, bool, Highest]
"""What tells blocks of a run apart: their structure, whether they are the model's first, behind
which nothing hides, and their transients."""
Group = tuple[Kind, int]
"""Alike blocks of a run, and how many they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """Undominated choices for the blocks of a run, fastest first."""

    seconds: NDArray[np.float64]
    """Recomputation of a microbatch."""
    kept: NDArray[np.int64]
    """Bytes kept of a microbatch."""
    highest: NDArray[np.int64]
    """Highest transients when a backward starts and when it ends, bytes, a row for each choice."""
    num_blocks: int
    """Blocks of the run."""
    counts: NDArray[np.int64]
    """Choices for the last group: how many blocks of each kind, in the order of RECOMPUTATIONS."""
    places: NDArray[np.intp]
    """Which choice each is of the last group. Plus, times the number of these, which it is of the
    groups before."""
    before: "Front | None" = None
    """Of the groups before; None where there is no group, and for the choices of one group."""

    def counts_of(self, place: int) -> list[tuple[int, ...]]:
        """How many blocks of each kind one choice has, by group."""
        counts: list[tuple[int, ...]] = []
        at: Front | None = self
        while at is not None and at.before is not None:
            place, last = divmod(int(at.places[place]), len(at.counts))
            counts.append(tuple(at.counts[last].tolist()))
            at = at.before
        return counts[::-1]


NO_BLOCKS = Front(
    seconds=np.zeros(1),
    kept=np.zeros(1, dtype=np.int64),
    highest=np.zeros((1, 2), dtype=np.int64),
    num_blocks=0,
    counts=np.zeros((1, len(RECOMPUTATIONS)), dtype=np.int64),
    places=np.zeros(1, dtype=np.intp),
)
"""The one choice where there is nothing to choose."""


FrontCache = dict[tuple[Group, ...], Front]
"""By what blocks a run has."""


@lru_cache(maxsize=4096)
def alike(
    number: int,
    *,
    seconds: tuple[float, ...],
    kept: tuple[int, ...],
    highest: Highest,
    allowed: tuple[bool, ...],
) -> Front:
    """Choices for one group of alike blocks, for the counts of each kind worth it.

    Many configurations that differ in what they hold and move ask for the same ones.

    Args:
        number: Blocks of the group.
        seconds: Recomputation of a block by kind, in the order of RECOMPUTATIONS.
        kept: Bytes that a block keeps.
        highest: Its highest transients, as ``Front`` has them.
        allowed: Which kinds there are to choose from.
    """
    counts = all_counts(number)
    for kind in np.flatnonzero(~np.array(allowed)):
        counts = counts[counts[:, kind] == 0]
    sums = counts @ np.array(seconds), counts @ np.array(kept)
    tops = np.zeros((2, len(counts)), dtype=np.int64)
    for numbers, top in zip(counts.T, highest, strict=True):  # numpy is slow along short axes
        np.maximum(tops, np.array(top)[:, None], out=tops, where=numbers > 0)
    at = undominated(*sums, tops.T)
    return Front(
        seconds=sums[0][at],
        kept=sums[1][at],
        highest=tops.T[at],
        num_blocks=number,
        counts=counts[at],
        places=np.arange(len(at)),
    )


def joined(front: Front, group: Front) -> Front:
    """A run and one more group of alike blocks."""
    seconds = np.add.outer(front.seconds, group.seconds).ravel()
    kept = np.add.outer(front.kept, group.kept).ravel()
    highest = np.maximum(front.highest[:, None], group.highest).reshape(-1, 2)
    at = undominated(seconds, kept, highest)
    return Front(
        seconds=seconds[at],
        kept=kept[at],
        highest=highest[at],
        num_blocks=front.num_blocks + group.num_blocks,
        counts=group.counts,
        places=at,
        before=front,
    )


@cache
def all_counts(number: int) -> NDArray[np.int64]:
    """All ways to give ``number`` alike blocks one kind each, in the order of RECOMPUTATIONS."""
    selective, full = np.indices((number + 1, number + 1)).reshape(2, -1)
    ways = np.column_stack([number - selective - full, selective, full])
    return ways[ways[:, 0] >= 0]


def undominated(
    seconds: NDArray[np.float64], kept: NDArray[np.int64], highest: NDArray[np.int64]
) -> NDArray[np.intp]:
    """Places of the points that no other beats in all four, fastest first."""
    order = np.lexsort((*highest.T, kept, seconds))
    kept, (starting, ending) = kept[order], highest[order].T
    worth_it = np.zeros(len(order), dtype=bool)
    left = ~worth_it
    while left.any():  # of those with the same transients
        place, most = left.argmax(), np.iinfo(np.int64).max
        start, end = starting[place], ending[place]
        lower = np.where((starting <= start) & (ending <= end), kept, most)
        before = np.minimum.accumulate(np.concatenate([[most], lower[:-1]]))
        are_alike = (starting == start) & (ending == end)
        worth_it |= are_alike & (kept < before)
        left &= ~are_alike
    return order[worth_it]


def in_order(counts: tuple[int, ...]) -> list[str]:
    """Kinds of alike blocks in model order; the earliest recompute most."""
    return [
        kind
        for kind, number in zip(reversed(RECOMPUTATIONS), reversed(counts), strict=True)
        for _ in range(number)
    ]
