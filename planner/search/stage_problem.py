"""One configuration's part of the ILP: the choices that can be part of a step below a limit."""

from collections.abc import Iterator, Sequence
from itertools import compress
from math import inf

import numpy as np
from numpy.typing import NDArray

from planner.cost.stage_links import Links
from planner.search.bounds import bounding_paths
from planner.search.columns import Column
from planner.search.configuration_search import ConfigurationSearch
from planner.search.holdings import holdings
from planner.search.partition import columns_below
from planner.search.stage_ilp import StageProblem

_MOST_ENTRIES = 200_000
"""Runs of units of all stages, times ranks with paths of their own, that programs are made of where
runs of a length are not alike."""


class TooManyRunsError(Exception):
    """The stages of a configuration have too many runs for a program."""


def stage_problem(search: ConfigurationSearch, limit_s: float) -> StageProblem | None:
    """The columns that can be part of a step no slower than the limit.

    Returns:
        None where no such step exists.

    Raises:
        TooManyRunsError: There are too many to choose from, and some choice is known.
    """
    counted = search.shares_ranks and search.is_uniform
    if not search.shares_ranks:
        stages = columns_below(search, limit_s)
    elif counted:
        near = [_near(search, stage) for stage in range(search.configuration.num_stages)]
        stages = _columns(search, near)
    else:
        stages = _columns(search, list(_runs(search, limit_s)))
    if not all(stages):
        return None
    held = holdings(search, stages, limit_s) if counted else None
    if held is not None and not all(held):
        return None
    stages = _in_time(search, stages, limit_s)
    if not counted:
        stages = _joined(stages, search.num_units)
    if not all(stages):
        return None
    apart = [[(column,) for column in columns] for columns in stages]
    return StageProblem(
        configuration=search.configuration,
        choices=tuple(tuple(choices) for choices in held or apart),
        room_bytes=search.room_bytes if search.shares_ranks and held is None else None,
        num_units=search.num_units if counted else None,
    )


def _columns(
    search: ConfigurationSearch, runs: Sequence[Sequence[tuple[int, int]]]
) -> list[list[Column]]:
    """Columns of each stage; stages with the same runs and links have one list of them."""
    known: dict[tuple[int, Links], list[Column]] = {}
    found = []
    for stage, runs_of_stage in enumerate(runs):
        key = (id(runs_of_stage), search.table.links(stage))
        if key not in known:
            known[key] = [column for run in runs_of_stage for column in search.columns(stage, *run)]
        found.append(known[key])
    return found


def _in_time(
    search: ConfigurationSearch, stages: Sequence[list[Column]], limit_s: float
) -> list[list[Column]]:
    """The columns of each stage that can be part of a step no slower than the limit.

    Along each path the column takes its own time and all other units their least: in the
    stage where these count least, which may be any. What data-parallel traffic adds to the
    other units is left out, since a part of it is in the column's own time.
    """
    if limit_s == inf:
        return list(stages)
    paths = bounding_paths(search.configuration)
    by_part = np.array([path.counts for path in paths], float).swapaxes(0, 1)
    least = by_part.min(axis=2)
    seconds: dict[int, NDArray[np.float64]] = {}
    found = []
    for stage, columns in enumerate(stages):
        if id(columns) not in seconds:
            seconds[id(columns)] = np.array([(*c.parts_s, *search.rest_s([c])) for c in columns])
        counts = np.vstack([by_part[:, :, stage], least])
        longest_s = (seconds[id(columns)] @ counts).max(axis=1) + search.once_s
        found.append(list(compress(columns, longest_s <= limit_s * (1 + 1e-9))))
    return found


def _runs(search: ConfigurationSearch, limit_s: float) -> Iterator[list[tuple[int, int]]]:
    """Runs of each stage that may be part of a step no slower than the limit.

    They start where the stage before may end, leave every later stage at least one unit,
    and leave no more than the later stages can take.
    """
    num_stages, pp = search.configuration.num_stages, search.configuration.degrees.pp
    slowest_s = search.slowest_s(limit_s)
    rest_s = slowest_s * pp
    reached, num_runs = {0}, 0
    for stage in range(num_stages):
        later = num_stages - 1 - stage
        runs = [
            (first, end)
            for first in sorted(reached)
            for end in search.ends(stage, first, slowest_s)
            if later == 0 or search.least_s(end, search.num_units) <= rest_s
        ]
        yield runs
        reached = {end for _, end in runs}
        num_runs += len(runs)
        if num_runs * pp > _MOST_ENTRIES and limit_s < inf:
            raise TooManyRunsError


def _near(search: ConfigurationSearch, stage: int) -> list[tuple[int, int]]:
    """One run for each length that a stage may have, where inner runs are alike."""
    if stage == 0:
        return [run for end in search.positions[1:-1] if search.is_near_even(*(run := (0, end)))]
    if stage == search.configuration.num_stages - 1:
        end = search.num_units
        return [
            run for first in search.positions[1:-1] if search.is_near_even(*(run := (first, end)))
        ]
    return search.near_inner_runs


def _joined(stages: list[list[Column]], end: int) -> list[list[Column]]:
    """Drop columns that no chain of columns from the first to the last unit contains."""
    reached = {0}
    forward = []
    for columns in stages:
        kept = [column for column in columns if column.first in reached]
        reached = {column.end for column in kept}
        forward.append(kept)
    needed = {end}
    backward = []
    for columns in reversed(forward):
        kept = [column for column in columns if column.end in needed]
        needed = {column.first for column in kept}
        backward.append(kept)
    return backward[::-1]
