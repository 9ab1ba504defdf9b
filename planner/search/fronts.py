"""Choices of recomputation for alike blocks, without those that another beats.

Only counts per kind matter, so that a choice is a point: its seconds, kept bytes and transients.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from planner.cost.held_stage import left_bytes
from planner.vocabulary import RECOMPUTATIONS

Point = tuple[float, int, float, tuple[tuple[int, ...], ...]]
"""A choice of kinds for some structures: recomputation seconds, kept bytes, highest transient,
and per structure how many blocks of each kind, in the order of RECOMPUTATIONS."""


Alike = tuple[str, bool]
"""Structure of a block, and whether it is the model's first."""


class Front:
    """Undominated choices for the blocks of a run, also as arrays."""

    def __init__(self, points: list[Point]) -> None:
        self.points = points
        self.kept = np.array([point[1] for point in points])
        self.highest = np.array([point[2] for point in points])
        self.left = np.array([left_bytes(point[1], sum(map(sum, point[3]))) for point in points])


FrontCache = dict[tuple[tuple[str, bool, int, int], ...], Front]
"""Undominated choices by how many blocks of each kind a run has, and what a configuration adds to
their transients."""


def both(left: Point, right: Point) -> Point:
    """Two choices together."""
    return (
        left[0] + right[0],
        left[1] + right[1],
        max(left[2], right[2]),
        left[3] + right[3],
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
    """Places of the points that no other beats in all three, fastest first."""
    order = np.lexsort((highest, kept, seconds))
    kept, highest = kept[order], highest[order]
    worth_it = np.zeros(len(order), dtype=bool)
    for top in np.unique(highest):
        lower = np.where(highest <= top, kept, np.iinfo(np.int64).max)
        before = np.minimum.accumulate(np.concatenate([[np.iinfo(np.int64).max], lower[:-1]]))
        worth_it |= (highest == top) & (kept < before)
    return order[worth_it]


def in_order(counts: tuple[int, ...]) -> list[str]:
    """Kinds of alike blocks in model order; the earliest recompute most."""
    return [
        kind
        for kind, number in zip(reversed(RECOMPUTATIONS), reversed(counts), strict=True)
        for _ in range(number)
    ]


def pruned(points: list[Point]) -> list[Point]:
    """Points that no other beats in time, kept bytes and transients, fastest first."""
    seconds, kept, highest = (np.array(values) for values in list(zip(*points, strict=True))[:3])
    return [points[at] for at in undominated(seconds, kept, highest)]
