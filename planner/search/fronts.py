"""Choices of recomputation for alike blocks, without those that another beats.

Only counts per kind matter, so that a choice is a point: its seconds, kept bytes and transients.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.vocabulary import RECOMPUTATIONS

Highest = tuple[tuple[int, int], ...]
"""Highest transients by recomputation, when a backward starts and when it ends."""
Kind = tuple[str, bool, Highest, tuple[int, ...]]
"""What tells blocks of a run apart: their structure, whether they are the model's first, behind
which nothing hides, their transients, and ``received`` of the run's first one (``alike``)."""
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


Ranks = Sequence[NDArray[np.unsignedinteger]]
"""Sizes of points, each as its place in order."""

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

_FEW_KINDS = 64
"""Kinds of points, up to which comparing kinds is faster."""


@lru_cache(maxsize=4096)
def alike(
    number: int,
    *,
    seconds: tuple[float, ...],
    kept: tuple[int, ...],
    highest: Highest,
    allowed: tuple[bool, ...],
    received: tuple[int, ...] = (),
) -> Front:
    """Choices for one group of alike blocks, for the counts of each kind worth it.

    Many configurations that differ in what they hold and move ask for the same ones.

    Args:
        number: Blocks of the group.
        seconds: Recomputation of a block by kind, in the order of RECOMPUTATIONS.
        kept: Bytes that a block keeps.
        highest: Its highest transients, as ``Front`` has them.
        allowed: Which kinds there are to choose from.
        received: What the first of them keeps less by kind, where it is the first of a stage;
            () where it is not, or keeps as much. It recomputes most (``in_order``).
    """
    counts = all_counts(number)
    for kind in np.flatnonzero(~np.array(allowed)):
        counts = counts[counts[:, kind] == 0]
    sums = counts @ np.array(seconds), counts @ np.array(kept)
    if received:
        most = len(RECOMPUTATIONS) - 1 - (counts[:, ::-1] > 0).argmax(axis=1)
        sums = sums[0], sums[1] - np.array(received)[most]
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


def undominated(
    seconds: NDArray[np.float64], kept: NDArray[np.int64], *others: NDArray[np.int64]
) -> NDArray[np.intp]:
    """Places of the points that no other beats in seconds and all sizes, fastest first.

    Points whose sizes are alike but for ``kept`` beat each other as they come in order; where there
    are few such kinds of points, kinds are compared, else points.
    """
    order = np.lexsort((*reversed(others), kept, seconds))
    kept = kept[order]
    kinds = [_ranks(each[order]) for each in others]
    of_kind = np.zeros(len(order), dtype=np.int64)
    for each in kinds:
        of_kind = of_kind * len(order) + each
    _, listed, of_kind = np.unique(of_kind, return_index=True, return_inverse=True)
    if len(listed) > _FEW_KINDS:
        return order[_compared([_ranks(kept), *kinds])]
    own = [each[listed] for each in kinds]
    return order[_beaten_by_none(kept, of_kind, _beat(own, own))]


def _ranks(sizes: NDArray[np.int64]) -> NDArray[np.unsignedinteger]:
    """Numbers in the same order, as small as can be: they are compared faster."""
    ranks = np.unique(sizes, return_inverse=True)[1]
    return ranks.astype(np.min_scalar_type(len(sizes)))


def _beaten_by_none(
    kept: NDArray[np.int64], of_kind: NDArray[np.intp], beat: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Which points no earlier one beats: none of a kind that beats theirs keeps as little."""
    worth_it = np.zeros(len(kept), dtype=bool)
    most = np.iinfo(kept.dtype).max
    for kind, beating in enumerate(beat.T):
        lower = np.where(beating[of_kind], kept, most)
        before = np.minimum.accumulate(np.concatenate([[most], lower[:-1]]))
        worth_it |= (of_kind == kind) & (kept < before)
    return worth_it


def _compared(ranks: Ranks) -> NDArray[np.intp]:
    """Places of the points that no earlier one beats."""
    found = np.empty(0, dtype=np.intp)
    for start in range(0, len(ranks[0]), _AT_ONCE):
        new = np.arange(start, min(start + _AT_ONCE, len(ranks[0])))
        earlier, own = [each[found] for each in ranks], [each[new] for each in ranks]
        left = np.flatnonzero(~_beat(earlier, own).any(axis=0))
        own = [each[left] for each in own]
        left = left[~np.triu(_beat(own, own), 1).any(axis=0)]
        found = np.concatenate([found, new[left]])
    return found


def _beat(points: Ranks, others: Ranks) -> NDArray[np.bool_]:
    """Which points, by row, are no larger in any size than which others, by column."""
    beat = points[0][:, None] <= others[0]
    for own, its in zip(points[1:], others[1:], strict=True):
        beat &= own[:, None] <= its
    return beat


def in_order(counts: tuple[int, ...]) -> list[str]:
    """Kinds of alike blocks in model order; the earliest recompute most."""
    return [
        kind
        for kind, number in zip(reversed(RECOMPUTATIONS), reversed(counts), strict=True)
        for _ in range(number)
    ]
