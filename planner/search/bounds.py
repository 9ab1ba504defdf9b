"""Lower bounds on the time of a pipeline, whatever its stages take.

What lies on a path through the action list (``planner.cost.pipeline.Path``) takes its time, and no
list is faster than one of its paths. With f[s] and b[s] the forward and backward of stage s, m
microbatches and r a rank, three paths are long for any schedule without split backwards:

    all of r        the forwards before r, all actions of r, the backwards before r
    fill            the first microbatch all the way forward and back to r, then what r has left
                    after its first backward, the backwards before r
    drain           the forwards before r, what r does up to its last forward, the last microbatch
                    on from there and all the way back

Where a rank holds one stage and runs 1F1B, a fourth one weaves between ranks. The first microbatch
goes all the way forward and back to r, which alternates between forwards and backwards from there
on, and the last one goes on from it all the way and back. All stages behind r lie on it twice:

    around r        all stages once, those behind r once more, r another m - 1 - (pp - 1 - r) times

It is the only one of a rank that counts m + pp - 1 passes of stages, whatever r is, as many as the
list takes where all are as long: a slow stage in front costs as much as one at the end.

Where all forwards come before all backwards (GPipe) one path is longer than any of these, and
stands for fill and drain:

    both phases     the forwards before r, all forwards of r, the last microbatch on from there; the
                    first one all the way back to r, all backwards of r, the backwards before r

These rows bound the ILP's objective from below; where the action list takes longer than all of
them, its longest path becomes one more (``stage_ilp``).

Any convex combination of rows is a bound too. ``least_s`` takes their mean, with stage times as
unfavourable as they can be: precondition is that the stages' forwards (backwards) add up to at
least the given sum, and that each is at least the given share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.cost.pipeline import Path
from planner.cost.shared_cores import joint_s, on_cores
from planner.strategy.configuration import Configuration
from planner.strategy.schedules import Actions, Pass, actions_by_rank, shortened
from planner.vocabulary import ZERO_BUBBLE_SCHEDULES, Schedule

_PARTS: Mapping[Pass, tuple[int, ...]] = {"F": (0,), "B": (1, 2), "I": (1,), "W": (2,)}
"""Parts of ``Path.counts`` that an action takes."""

Counts = NDArray[np.int64]
"""How often paths take stages: (rank, path, part of ``Path.counts``, stage)."""


def bounding_paths(configuration: Configuration) -> tuple[Path, ...]:
    """The paths of every rank, as many of each; the one path where there is no pipeline.

    Where ranks share cores, what these make with all work of the cores (``on_cores``).
    """
    return on_cores(configuration, _paths_of(configuration))


def _paths_of(configuration: Configuration) -> tuple[Path, ...]:
    return _paths(
        configuration.schedule,
        configuration.degrees.pp,
        configuration.virtual_stages,
        configuration.num_microbatches,
    )


def counts_by_rank(configuration: Configuration) -> NDArray[np.float64]:
    """``Path.counts`` of ``paths_of_rank``: (rank, path, part, stage)."""
    if configuration.shares_cores:
        ranks = range(configuration.degrees.pp)
        paths = (paths_of_rank(configuration, rank) for rank in ranks)
        return np.array([[path.counts for path in of_rank] for of_rank in paths], float)
    return _counts_of(
        configuration.schedule,
        configuration.degrees.pp,
        configuration.virtual_stages,
        configuration.num_microbatches,
    ).astype(float)


def paths_of_rank(configuration: Configuration, rank: int) -> tuple[Path, ...]:
    """Those of ``bounding_paths`` that are long where a rank is slow."""
    return on_cores(configuration, list_paths_of_rank(configuration, rank))


def list_paths_of_rank(configuration: Configuration, rank: int) -> tuple[Path, ...]:
    """The same through the action list, with each rank taking its times."""
    paths = _paths_of(configuration)
    number = len(paths) // configuration.degrees.pp
    return paths[number * rank : number * (rank + 1)]


@lru_cache(maxsize=4096)
def _paths(schedule: str, pp: int, virtual_stages: int, num_microbatches: int) -> tuple[Path, ...]:
    counts = _counts(schedule, pp, virtual_stages, num_microbatches)
    divides = schedule in ZERO_BUBBLE_SCHEDULES
    return tuple(
        Path(
            forwards=tuple(forwards),
            backwards=tuple(backwards),
            weights=tuple(weights) if divides else None,
        )
        for forwards, backwards, weights in counts.reshape(-1, *counts.shape[2:]).tolist()
    )


@lru_cache(maxsize=256)
def _counts_of(schedule: str, pp: int, virtual_stages: int, num_microbatches: int) -> Counts:
    return _counts(schedule, pp, virtual_stages, num_microbatches)


def _counts(schedule: str, pp: int, virtual_stages: int, num_microbatches: int) -> Counts:
    """What the paths of every rank count; all at once, since most are only asked for their mean."""
    if schedule == Schedule.NONE:
        return np.full((1, 1, 3, 1), num_microbatches)
    if schedule == Schedule.GPIPE:
        return _in_phases(pp, num_microbatches)
    short = shortened(
        schedule, pp=pp, virtual_stages=virtual_stages, num_microbatches=num_microbatches
    )
    lists = actions_by_rank(schedule, pp=pp, virtual_stages=virtual_stages, num_microbatches=short)
    left_out = num_microbatches - short
    if schedule in ZERO_BUBBLE_SCHEDULES:
        stages = pp * virtual_stages
        return np.array([_divided(row, stages=stages, left_out=left_out) for row in lists])
    return _in_turns(lists, virtual_stages, num_microbatches)


def _in_phases(pp: int, num_microbatches: int) -> Counts:
    """All of a rank, and twice both phases, where all forwards come before all backwards."""
    ranks, stages = np.indices((pp, pp))
    before = np.where(stages == ranks, num_microbatches, stages < ranks)
    through = np.where(stages == ranks, num_microbatches, 1)
    return _stacked([(before, before), (through, through), (through, through)])


def _in_turns(lists: Sequence[Actions], virtual_stages: int, num_microbatches: int) -> Counts:
    """All of a rank, its fill, its drain; the path around it where it holds one stage.

    Args:
        lists: Actions of each rank, from which microbatches of the steady part may be missing.
        virtual_stages: Stages of a rank.
        num_microbatches: All microbatches.
    """
    pp = len(lists)
    ranks, stages = np.indices((pp, pp * virtual_stages))
    mine, is_behind = stages % pp == ranks, stages > stages[0, -pp] + ranks
    busy = np.where(mine, num_microbatches, stages < ranks)
    around = np.where(is_behind, 1, busy)
    turns = [(row, *_turns(row)) for row in lists]
    filling = np.array([_by_stage(row[:first], stages.shape[1]) for row, first, _ in turns])
    draining = np.array([_by_stage(row[last + 1 :], stages.shape[1]) for row, _, last in turns])
    later = np.where(mine, 1 + num_microbatches - filling, 1)
    earlier = np.where(mine, 1 + num_microbatches - draining, 1)
    paths = [(busy, busy), (later, around), (around, earlier)]
    if virtual_stages == 1:
        # To the end, back to the rank, which it does not leave, and to the end again.
        own = num_microbatches - (pp - 1 - ranks)
        weaving = np.where(mine, own, np.where(stages < ranks, 1, 2))
        paths.append((weaving, weaving))
    return _stacked(paths)


def _stacked(paths: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> Counts:
    """Paths, each by forwards and whole backwards of every rank."""
    parts = [[forwards, backwards, backwards] for forwards, backwards in paths]
    return np.moveaxis(np.array(parts), 2, 0)


def _by_stage(actions: Actions, stages: int) -> NDArray[np.int64]:
    """How many actions each stage has."""
    return np.bincount([stage for stage, _ in actions], minlength=stages)


def _turns(row: Actions) -> tuple[int, int]:
    """Places of a rank's first backward and of its last forward."""
    first_backward = next(at for at, (_, what) in enumerate(row) if what != "F")
    behind = next(at for at, (_, what) in enumerate(reversed(row), 1) if what == "F")
    return first_backward, len(row) - behind


def _divided(row: Actions, *, stages: int, left_out: int) -> list[list[list[int]]]:
    """All of a rank whose backwards are divided, its fill, its drain.

    Nobody waits for the second parts of backwards.

    Args:
        row: Its actions, from which ``left_out`` microbatches of the steady part are missing.
        stages: Stages in all.
        left_out: Microbatches.
    """
    mine = {stage for stage, _ in row}
    first_backward, last_forward = _turns(row)
    begins, ends = row[first_backward][0], row[last_forward][0]
    before: Actions = tuple((stage, "F") for stage in range(min(mine)))
    there: Actions = tuple((stage, "F") for stage in range(stages))
    back: Actions = tuple((stage, "I" if stage else "B") for stage in reversed(range(stages)))
    whole: tuple[Pass, ...] = ("F", "B")
    middle: Actions = tuple((stage, what) for stage in mine for what in whole) * left_out
    around = (*back[: stages - 1 - begins], *row[first_backward:])
    return [
        _counted((*before, *row, *middle), stages),
        _counted((*there, *around, *middle), stages),
        _counted((*before, *row[: last_forward + 1], *middle, *there[ends + 1 :], *back), stages),
    ]


def _counted(actions: Actions, stages: int) -> list[list[int]]:
    """What the path that takes some actions counts."""
    counts = [[0] * stages for _ in range(3)]
    for stage, what in actions:
        for part in _PARTS[what]:
            counts[part][stage] += 1
    return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Means:
    """Of the means over the ranks of their paths, a row each."""

    in_all: NDArray[np.float64]
    """Each part of ``Path.counts``, all stages together."""
    least: NDArray[np.float64]
    """The same of the stage that counts least."""
    around: NDArray[np.float64]
    """What has transfers, by stage: forwards, and the parts of backwards that others wait for."""


@lru_cache(maxsize=65536)
def _means(schedule: str, pp: int, virtual_stages: int, num_microbatches: int) -> _Means:
    means = _counts(schedule, pp, virtual_stages, num_microbatches).mean(axis=0)
    return _Means(
        in_all=means.sum(axis=2), least=means.min(axis=2), around=means[:, :2].sum(axis=1)
    )


def least_of_kinds_s(
    configuration: Configuration,
    units_s: NDArray[np.float64],
    transfers_s: Sequence[float],
) -> float:
    """No cut is faster where stages run on devices of several kinds.

    Any weights of the ranks that add up to 1 make the mean of their paths a bound. Each unit counts
    in it what it takes in the stage where that is least. Slow ranks have small weights: with equal
    ones all units would seem to run on the fastest.

    Args:
        configuration: Schedule and microbatches; one stage on each rank.
        units_s: What each unit takes in each stage, at the least: (stage, part of ``Path.counts``,
            unit).
        transfers_s: As in ``least_s``.
    """
    speeds = 1 / units_s.sum(axis=(1, 2))
    means = np.tensordot(speeds / speeds.sum(), counts_by_rank(configuration), axes=1)
    taken_s = np.einsum("kas,sau->ksu", means, units_s).min(axis=1).sum(axis=1)
    taken_s += means[:, :2].sum(axis=1) @ np.array(transfers_s) / 2
    return float(taken_s.max())


def _means_of(configuration: Configuration) -> _Means:
    return _means(
        configuration.schedule,
        configuration.degrees.pp,
        configuration.virtual_stages,
        configuration.num_microbatches,
    )


def least_passes(configuration: Configuration) -> float:
    """Passes of a microbatch through all units that no cut avoids, whatever its passes divide into.

    With all of the model in the stage that counts least, and in the part of it that does.
    """
    least = _means_of(configuration).least
    parts = least if configuration.divides_backward else least[:, :2]
    of_list = configuration.waiting_share * float(parts.min(axis=1).max())
    return joint_s(of_list, configuration.work_passes)


Parts = tuple[float, float, float]
"""Seconds of what ``Path.counts`` counts: forward, backward, the backward's part for weights."""


def least_s(
    configuration: Configuration,
    *,
    parts_s: Parts,
    least_parts_s: Parts = (0.0, 0.0, 0.0),
    transfers_s: Sequence[float] | None = None,
) -> float:
    """No cut of a model is faster under a configuration.

    Args:
        configuration: Schedule and microbatches.
        parts_s: One microbatch through all stages, at the least.
        least_parts_s: The same through each stage.
        transfers_s: What each stage's transfers take beyond that, at the least: half of it in its
            forward, half in the part of its backward that others wait for.
    """
    means = _means_of(configuration)
    # Every stage takes its least, the stage that counts least takes the rest.
    least = np.array(least_parts_s)
    rest_s = np.array(parts_s) - least * means.around.shape[1]
    seconds = means.in_all @ least + means.least @ rest_s
    all_s = sum(parts_s)
    if transfers_s is not None:
        seconds = seconds + means.around @ np.array(transfers_s) / 2
        all_s += sum(transfers_s)
    list_s = configuration.waiting_share * float(seconds.max())
    return joint_s(list_s, configuration.work_passes * all_s)
