"""What a rank can hold that has several stages: all their columns at once.

Where inner runs are alike, a stage is told by its length and its recomputation, wherever it lies,
so that the choices of one rank can be listed without the others': those that fit its memory, in a
step that may beat the limit. Memory is then no matter of the ILP, whose relaxation would mix a
column that fits too well with one that does not fit.

Of two choices with stages of the same lengths, one that is no slower in any stage is enough: no
path through the action list, and no rank's end, prefers the other.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.cost.pipeline import Path
from planner.search.bounds import bounding_paths
from planner.search.columns import Column, Holding
from planner.search.configuration_search import ConfigurationSearch
from planner.strategy.schedules import StageMoment

_MOST_LISTED = 50_000
"""Choices of the first stages of a rank that are looked at at once."""

Floats = NDArray[np.float64]


def holdings(
    search: ConfigurationSearch, stages: Sequence[Sequence[Column]], limit_s: float
) -> list[list[Holding]] | None:
    """What each rank can hold in a step no slower than the limit.

    Args:
        search: A configuration whose columns stand for all runs of their length.
        stages: Columns of each stage, at least one.
        limit_s: Steps that are slower need not be found.

    Returns:
        Choices by rank, all empty from a rank on that can hold none; None where there are too
        many to list.
    """
    pp = search.configuration.degrees.pp
    found: list[list[Holding]] = [[] for _ in range(pp)]
    for rank in range(pp):
        listed = _Listing(search, stages, rank, limit_s).run()
        if listed is None:
            return None
        if not listed:
            break
        found[rank] = listed
    return found


class _Listing:
    """The choices of one rank, extended stage by stage."""

    def __init__(
        self,
        search: ConfigurationSearch,
        stages: Sequence[Sequence[Column]],
        rank: int,
        limit_s: float,
    ) -> None:
        pp = search.configuration.degrees.pp
        mine = range(rank, len(stages), pp)
        self._search = search
        self._rank = rank
        self._most_s = limit_s * (1 + 1e-9) - search.once_s
        self._columns = [stages[stage] for stage in mine]
        self._paths = bounding_paths(search.configuration)[3 * rank : 3 * rank + 3]
        self._others = [stage for stage in range(len(stages)) if stage % pp != rank]
        moments = search.configuration.fullest_moments(rank)
        self._seconds = [
            _path_s(self._columns[at], stage, self._paths) for at, stage in enumerate(mine)
        ]
        """For each stage: seconds of each column along each path."""
        self._bytes = [
            _held_bytes(columns, [moment[at] for moment in moments])
            for at, columns in enumerate(self._columns)
        ]
        """For each stage: bytes of each column at each moment."""

    def run(self) -> list[Holding] | None:
        """All choices, none of which makes another needless; None where there are too many."""
        seconds, sizes = np.zeros((1, len(self._paths))), np.zeros((1, self._bytes[0].shape[1]))
        places = np.zeros((1, 0), dtype=np.intp)
        for at, columns in enumerate(self._columns):
            if len(places) * len(columns) > _MOST_LISTED:
                return None
            before = np.repeat(np.arange(len(places)), len(columns))
            added = np.tile(np.arange(len(columns)), len(places))
            seconds = seconds[before] + self._seconds[at][added]
            sizes = sizes[before] + self._bytes[at][added]
            kept = (seconds + _least(self._seconds[at + 1 :]) <= self._most_s).all(axis=1)
            kept &= (sizes + _least(self._bytes[at + 1 :]) <= self._search.room_bytes).all(axis=1)
            seconds, sizes = seconds[kept], sizes[kept]
            places = np.column_stack([places[before[kept]], added[kept]])
        found = []
        for row, times in zip(places, seconds, strict=True):
            held = tuple(columns[at] for columns, at in zip(self._columns, row, strict=True))
            if self._leaves_enough(held, times) and self._search.fits(self._rank, held):
                found.append(held)
        return _undominated(found)

    def _leaves_enough(self, held: Holding, times: Floats) -> bool:
        """Whether the other ranks can do the rest in time.

        Along the paths of this rank the rest counts where it counts least. And one of the others
        has its even share of the rest to do, for every microbatch.
        """
        forward_s, backward_s = self._search.rest_s(held)
        configuration = self._search.configuration
        share_s = (forward_s + backward_s) / (configuration.degrees.pp - 1)
        return configuration.num_microbatches * share_s <= self._most_s and all(
            so_far
            + min(path.forwards[stage] for stage in self._others) * forward_s
            + min(path.backwards[stage] for stage in self._others) * backward_s
            <= self._most_s
            for so_far, path in zip(times, self._paths, strict=True)
        )


def _path_s(columns: Sequence[Column], stage: int, paths: Sequence[Path]) -> Floats:
    forward_s = np.array([[column.forward_s] for column in columns])
    backward_s = np.array([[column.backward_s] for column in columns])
    forwards = np.array([[path.forwards[stage] for path in paths]])
    backwards = np.array([[path.backwards[stage] for path in paths]])
    seconds: Floats = forward_s * forwards + backward_s * backwards
    return seconds


def _held_bytes(columns: Sequence[Column], moments: Sequence[StageMoment]) -> Floats:
    """What a stage holds at each moment, but for transients."""
    return np.array([[column.held_bytes(moment) for moment in moments] for column in columns])


def _least(later: Sequence[Floats]) -> Floats | float:
    """What the stages to come take at the least, along each path or at each moment."""
    return sum((each.min(axis=0) for each in later), np.zeros(()))


def _undominated(found: list[Holding]) -> list[Holding]:
    """Choices that no other with the same lengths beats in every stage."""
    by_lengths: dict[tuple[int, ...], list[Holding]] = {}
    for held in sorted(found, key=lambda held: sum(column.microbatch_s for column in held)):
        alike = by_lengths.setdefault(tuple(c.end - c.first for c in held), [])
        if not any(_is_no_slower(other, held) for other in alike):
            alike.append(held)
    return [held for alike in by_lengths.values() for held in alike]


def _is_no_slower(one: Holding, other: Holding) -> bool:
    return all(
        a.forward_s <= b.forward_s and a.backward_s <= b.backward_s and a.step_s <= b.step_s
        for a, b in zip(one, other, strict=True)
    )
