"""Choices of recomputation for alike blocks, without those that another beats.

Only counts per kind matter, so that a choice is a point: its seconds, kept bytes and transients.
"""

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

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
    gone: NDArray[np.int64]
    """What of it is gone when a block before them runs its backward, up to what lets a choice's own
    transients be the highest whatever comes before."""
    num_blocks: int
    """Blocks of the run."""
    counts: NDArray[np.int64]
    """Of one group: how many blocks of each kind, in the order of RECOMPUTATIONS."""
    joins: "tuple[Front, Front] | None" = None
    """The first blocks and the others, where these are choices of both."""
    places: NDArray[np.intp]
    """Which choice each is of the others. Plus, times the number of these, which it is of the first
    ones."""

    def counts_of(self, place: int) -> list[tuple[int, ...]]:
        """How many blocks of each kind one choice has, by group."""
        if self.joins is None:
            return [tuple(self.counts[place].tolist())] if self.num_blocks else []
        first, others = self.joins
        earlier, later = divmod(int(self.places[place]), len(others.seconds))
        return [*first.counts_of(earlier), *others.counts_of(later)]


NO_BLOCKS = Front(
    seconds=np.zeros(1),
    kept=np.zeros(1, dtype=np.int64),
    highest=np.zeros((1, 2), dtype=np.int64),
    gone=np.zeros(1, dtype=np.int64),
    num_blocks=0,
    counts=np.zeros((1, len(RECOMPUTATIONS)), dtype=np.int64),
    places=np.zeros(1, dtype=np.intp),
)
"""The one choice where there is nothing to choose."""


Section = tuple[Group, ...]
"""Blocks behind whose transients nothing counts as gone but what later sections keep."""


class Beside(NamedTuple):
    """What ``Transients`` tells of a section besides its choices, bytes."""

    left_bytes: int
    """What is not gone of what it keeps when the run before it runs its backward."""
    come_bytes: int
    """What has come by then."""
    start_bytes: int
    """What it has beside when its own backward starts."""
    most_bytes: int
    """More than a block before it has there in all, with what comes in its place."""


FrontCache = dict[Section | tuple[tuple[Section, Beside], ...], Front]
"""Of a section by its blocks; of a run by its sections, and what is beside each."""

_AT_ONCE = 128
"""Points that are compared with others at once."""


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
    at = undominated(*sums, *tops)
    return Front(
        seconds=sums[0][at],
        kept=sums[1][at],
        highest=tops.T[at],
        gone=np.zeros_like(at),
        num_blocks=number,
        counts=counts[at],
        places=np.arange(len(at)),
    )


def joined(front: Front, last: Front) -> Front:
    """A section and one more group of its blocks."""
    seconds, kept = _sums(front, last)
    tops = np.maximum(front.highest[:, None], last.highest).reshape(-1, 2)
    at = undominated(seconds, kept, *tops.T)
    return Front(
        seconds=seconds[at],
        kept=kept[at],
        highest=tops[at],
        gone=np.zeros_like(at),
        num_blocks=front.num_blocks + last.num_blocks,
        counts=NO_BLOCKS.counts,
        joins=(front, last),
        places=at,
    )


def before(section: Front, run: Front, beside: Beside) -> Front:
    """A run and one more section before it.

    Args:
        section: Choices for the section.
        run: Choices for the run.
        beside: What is beside the section's own.
    """
    seconds, kept = _sums(section, run)
    starting = section.highest[:, :1] + beside.start_bytes - run.gone
    starting = np.maximum(starting, run.highest[:, 0]).ravel()
    ending = np.maximum.outer(section.highest[:, 1], run.highest[:, 1]).ravel()
    goes = np.maximum(0, section.kept - beside.left_bytes) - beside.come_bytes
    gone = np.minimum(np.add.outer(goes, run.gone).ravel(), beside.most_bytes - starting)
    at = undominated(seconds, kept, starting, ending, -gone)
    return Front(
        seconds=seconds[at],
        kept=kept[at],
        highest=np.column_stack([starting, ending])[at],
        gone=gone[at],
        num_blocks=section.num_blocks + run.num_blocks,
        counts=NO_BLOCKS.counts,
        joins=(section, run),
        places=at,
    )


def _sums(first: Front, others: Front) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Seconds and bytes kept of all choices of both."""
    seconds = np.add.outer(first.seconds, others.seconds).ravel()
    return seconds, np.add.outer(first.kept, others.kept).ravel()


@cache
def all_counts(number: int) -> NDArray[np.int64]:
    """All ways to give ``number`` alike blocks one kind each, in the order of RECOMPUTATIONS."""
    selective, full = np.indices((number + 1, number + 1)).reshape(2, -1)
    ways = np.column_stack([number - selective - full, selective, full])
    return ways[ways[:, 0] >= 0]


def undominated(seconds: NDArray[np.float64], *sizes: NDArray[np.int64]) -> NDArray[np.intp]:
    """Places of the points that no other beats in seconds and all sizes, fastest first."""
    order = np.lexsort((*reversed(sizes), seconds))
    small = np.min_scalar_type(len(order))  # numpy compares small numbers faster
    ranks = np.array([np.unique(each[order], return_inverse=True)[1] for each in sizes], small)
    worth_it, found = np.empty_like(order), 0
    for start in range(0, len(order), _AT_ONCE):
        new = np.arange(start, min(start + _AT_ONCE, len(order)))
        new = new[~_beat(ranks[:, worth_it[:found]], ranks[:, new]).any(axis=0)]
        new = new[~np.triu(_beat(ranks[:, new], ranks[:, new]), 1).any(axis=0)]
        worth_it[found : found + len(new)] = new
        found += len(new)
    return order[worth_it[:found]]


def _beat(
    points: NDArray[np.unsignedinteger], others: NDArray[np.unsignedinteger]
) -> NDArray[np.bool_]:
    """Which points, by row, are no larger in any size than which others, by column."""
    beat = np.ones((points.shape[1], others.shape[1]), dtype=bool)
    for own, its in zip(points, others, strict=True):
        beat &= own[:, None] <= its
    return beat


def in_order(counts: tuple[int, ...]) -> list[str]:
    """Kinds of alike blocks in model order; the earliest recompute most."""
    return [
        kind
        for kind, number in zip(reversed(RECOMPUTATIONS), reversed(counts), strict=True)
        for _ in range(number)
    ]
