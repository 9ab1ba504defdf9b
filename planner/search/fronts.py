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
    """Highest transients when a backward starts, less what is gone by then of all that is kept, and
    when it ends, bytes, a row for each choice."""
    num_blocks: int
    """Blocks of the run."""
    counts: NDArray[np.int64]
    """Of one group: how many blocks of each kind, in the order of RECOMPUTATIONS."""
    joins: "tuple[Front, Front] | None" = None
    """The blocks before and the last ones, where these are choices of both."""
    places: NDArray[np.intp]
    """Which choice each is of the last ones. Plus, times the number of these, which it is of those
    before."""

    def counts_of(self, place: int) -> list[tuple[int, ...]]:
        """How many blocks of each kind one choice has, by group."""
        if self.joins is None:
            return [tuple(self.counts[place].tolist())] if self.num_blocks else []
        before, last = self.joins
        earlier, later = divmod(int(self.places[place]), len(last.seconds))
        return [*before.counts_of(earlier), *last.counts_of(later)]


NO_BLOCKS = Front(
    seconds=np.zeros(1),
    kept=np.zeros(1, dtype=np.int64),
    highest=np.zeros((1, 2), dtype=np.int64),
    num_blocks=0,
    counts=np.zeros((1, len(RECOMPUTATIONS)), dtype=np.int64),
    places=np.zeros(1, dtype=np.intp),
)
"""The one choice where there is nothing to choose."""


Section = tuple[Group, ...]
"""Blocks behind whose transients nothing counts as gone but what later sections keep."""

FrontCache = dict[Section | tuple[tuple[Section, int, int, int], ...], Front]
"""Of a section by its blocks; of a run by its sections, and what ``behind`` is told of each."""


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


def joined(front: Front, last: Front) -> Front:
    """A section and one more group of its blocks."""
    return _product(front, last, np.zeros_like(last.highest), last.highest)


def behind(
    front: Front, last: Front, *, left_bytes: int, come_bytes: int, beside_bytes: int
) -> Front:
    """A run and one more section behind it, as ``Transients`` tells of that.

    Args:
        front: Choices for the run.
        last: Choices for the section.
        left_bytes: What is not gone of what it keeps when the run before it runs its backward.
        come_bytes: What has come by then.
        beside_bytes: What it has beside when its own backward starts.
    """
    gone, highest = np.zeros_like(last.highest), last.highest.copy()
    gone[:, 0] = np.maximum(0, last.kept - left_bytes) - come_bytes
    highest[:, 0] += beside_bytes
    return _product(front, last, gone, highest)


def _product(
    front: Front, last: Front, gone: NDArray[np.int64], highest: NDArray[np.int64]
) -> Front:
    """All choices of both that no other beats.

    Args:
        front: Choices for a run.
        last: Choices for the blocks behind it.
        gone: What each of these lowers the transients of the run by.
        highest: Their own.
    """
    seconds = np.add.outer(front.seconds, last.seconds).ravel()
    kept = np.add.outer(front.kept, last.kept).ravel()
    tops = np.maximum(front.highest[:, None] - gone, highest).reshape(-1, 2)
    at = undominated(seconds, kept, tops)
    return Front(
        seconds=seconds[at],
        kept=kept[at],
        highest=tops[at],
        num_blocks=front.num_blocks + last.num_blocks,
        counts=NO_BLOCKS.counts,
        joins=(front, last),
        places=at,
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
