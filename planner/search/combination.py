"""The best choice of what each rank holds, by enumeration: for ranks of several stages.

Where the choices of each rank can be listed (``holdings``), those of all ranks are joined rank by
rank. What is chosen so far takes, along each known path through the action list, at least its own
time and the least of the ranks to come; a join that exceeds the limit is dropped. Of the complete
joins the one with the lowest bound runs its action list; where that takes longer, its longest
path becomes known and raises the bounds of the others. It ends when the fastest step that was met
is no slower than the lowest bound: the best by the action list itself.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.cost.pipeline import Path
from planner.cost.shared_cores import path_of
from planner.search.bounds import bounding_paths
from planner.search.columns import Column, Decided, Holding, Partition, placed, step_time_s
from planner.search.configuration_search import ConfigurationSearch
from planner.search.stage_ilp import TOLERANCE

_MOST_JOINS = 1_000_000
"""Joins of one more rank that are looked at at once."""
_MOST_TIMES = 20_000_000
"""Their times along all paths: 160 MB."""
_MOST_LISTS = 2_000
"""Action lists that are run."""

_Seconds = NDArray[np.float64]
_Places = NDArray[np.intp]


def best_combination(
    search: ConfigurationSearch,
    held: Sequence[Sequence[Holding]],
    limit_s: float,
    paths: Sequence[Path] = (),
) -> Decided | None:
    """Find the fastest choice below a limit.

    Args:
        search: A configuration whose columns stand for all runs of their length.
        held: What each rank can hold.
        limit_s: Steps that are no faster need not be found.
        paths: Paths of the action list that are known to matter.

    Returns:
        None where there are too many choices, or too many seem to be the best.
    """
    known = [*bounding_paths(search.configuration), *paths]
    joined = _Joins(search, held).run(known, limit_s)
    if joined is None:
        return None
    bounds_s, places = joined
    pp = len(held)
    best: Partition | None = None
    for _ in range(_MOST_LISTS):
        at = int(bounds_s.argmin()) if len(bounds_s) else -1
        best_s = limit_s if best is None else best.objective_s
        if at < 0 or bounds_s[at] * (1 + TOLERANCE) >= best_s:
            return Decided(partition=best, bound_s=best_s)
        columns = _columns(search, held, places[at])
        objective_s = step_time_s(search.configuration, columns)
        if objective_s < best_s:
            best = Partition(columns=tuple(columns), objective_s=objective_s)
        path = _longest(search, columns)
        rows = [_path_s(search, path, rank, held[rank]) for rank in range(pp)]
        once_s = _once_s(search, held, places)
        path_s = sum(rows[rank][places[:, rank]] for rank in range(pp))
        bounds_s = np.maximum(bounds_s, path_s + once_s)
        bounds_s[at] = max(float(bounds_s[at]), objective_s)
    return None


class _Joins:
    """All choices of some ranks together, told by their times along the known paths."""

    def __init__(self, search: ConfigurationSearch, held: Sequence[Sequence[Holding]]) -> None:
        self._search = search
        self._held = held
        self._lengths = [
            np.array([sum(c.end - c.first for c in columns) for columns in choices])
            for choices in held
        ]

    def run(self, paths: Sequence[Path], limit_s: float) -> tuple[_Seconds, _Places] | None:
        """Bounds of all complete choices below the limit, and the place of each rank's choice.

        Returns:
            None where they are too many.
        """
        held, pp = self._held, len(self._held)
        rows = [
            np.stack([_path_s(self._search, path, rank, held[rank]) for path in paths], axis=1)
            for rank in range(pp)
        ]
        steps = [_step_s(choices) for choices in held]
        times, once_s = np.zeros((1, len(paths))), np.full(1, self._search.once_s)
        units, places = np.zeros(1, dtype=np.intp), np.zeros((1, 0), dtype=np.intp)
        for rank in range(pp):
            joins = len(units) * len(held[rank])
            if joins > _MOST_JOINS or joins * len(paths) > _MOST_TIMES:
                return None
            before, added = (
                grid.ravel()
                for grid in np.meshgrid(
                    np.arange(len(units)), np.arange(len(held[rank])), indexing="ij"
                )
            )
            units_now = units[before] + self._lengths[rank][added]
            least, most = self._units_to_come(rank + 1)
            rest = self._search.num_units - units_now
            fits = (rest >= least) & (rest <= most)
            before, added, units = before[fits], added[fits], units_now[fits]
            times = times[before] + rows[rank][added]
            once_s = np.maximum(once_s[before], steps[rank][added])
            to_come_s = sum((row.min(axis=0) for row in rows[rank + 1 :]), np.zeros(len(paths)))
            kept = (times + to_come_s).max(axis=1) + once_s <= limit_s * (1 + 1e-9)
            times, once_s, units = times[kept], once_s[kept], units[kept]
            places = np.column_stack([places[before[kept]], added[kept]])
        return times.max(axis=1, initial=0.0) + once_s, places

    def _units_to_come(self, rank: int) -> tuple[int, int]:
        """Fewest and most units that the ranks from one on can hold."""
        later = self._lengths[rank:]
        return sum(int(each.min()) for each in later), sum(int(each.max()) for each in later)


def _path_s(
    search: ConfigurationSearch, path: Path, rank: int, choices: Sequence[Holding]
) -> _Seconds:
    """What each choice of a rank takes along a path."""
    mine = list(search.configuration.stages_of(rank))
    counts = np.array(path.counts, float)[:, mine]
    parts_s = np.array([[column.parts_s for column in held] for held in choices])
    seconds: _Seconds = np.einsum("csp,ps->c", parts_s, counts)
    return seconds


def _step_s(choices: Sequence[Holding]) -> _Seconds:
    """What each choice of a rank takes once per step."""
    return np.array([sum(column.step_s for column in held) for held in choices])


def _once_s(
    search: ConfigurationSearch, held: Sequence[Sequence[Holding]], places: _Places
) -> _Seconds:
    """The dearest end of a step of each complete choice."""
    steps = [_step_s(choices)[places[:, rank]] for rank, choices in enumerate(held)]
    dearest: _Seconds = np.maximum(np.max(steps, axis=0), search.once_s)
    return dearest


def _columns(
    search: ConfigurationSearch, held: Sequence[Sequence[Holding]], places: _Places
) -> list[Column]:
    """The stages of a complete choice, in model order."""
    chosen: dict[int, Column] = {}
    for rank, place in enumerate(places):
        chosen.update(
            zip(search.configuration.stages_of(rank), held[rank][int(place)], strict=True)
        )
    return list(placed([chosen[stage] for stage in sorted(chosen)]))


def _longest(search: ConfigurationSearch, columns: Sequence[Column]) -> Path:
    configuration = search.configuration
    return path_of(
        configuration,
        forward_s=[column.forward_s for column in columns],
        backward_s=[column.backward_s for column in columns],
        weight_backward_s=[column.weight_s for column in columns],
    )
