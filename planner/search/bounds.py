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

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.cost.pipeline import Path
from planner.strategy.configuration import Configuration
from planner.strategy.schedules import Actions, Pass, actions_by_rank, shortened
from planner.vocabulary import ZERO_BUBBLE_SCHEDULES, Schedule

_PARTS: Mapping[Pass, tuple[int, ...]] = {"F": (0,), "B": (1, 2), "I": (1,), "W": (2,)}
"""Parts of ``Path.counts`` that an action takes."""


def bounding_paths(configuration: Configuration) -> tuple[Path, ...]:
    """The paths of every rank, as many of each; the one path where there is no pipeline."""
    return _paths(
        configuration.schedule,
        configuration.degrees.pp,
        configuration.virtual_stages,
        configuration.num_microbatches,
    )


def paths_of_rank(configuration: Configuration, rank: int) -> tuple[Path, ...]:
    """Those of ``bounding_paths`` that are long where a rank is slow."""
    paths = bounding_paths(configuration)
    number = len(paths) // configuration.degrees.pp
    return paths[number * rank : number * (rank + 1)]


@lru_cache(maxsize=4096)
def _paths(schedule: str, pp: int, virtual_stages: int, num_microbatches: int) -> tuple[Path, ...]:
    if schedule == Schedule.NONE:
        return (Path(forwards=(num_microbatches,), backwards=(num_microbatches,)),)
    if schedule == Schedule.GPIPE:
        return tuple(path for rank in range(pp) for path in _in_phases(rank, pp, num_microbatches))
    short = shortened(
        schedule, pp=pp, virtual_stages=virtual_stages, num_microbatches=num_microbatches
    )
    lists = actions_by_rank(schedule, pp=pp, virtual_stages=virtual_stages, num_microbatches=short)
    stages = pp * virtual_stages
    left_out = num_microbatches - short
    return tuple(
        path
        for rank in range(pp)
        for path in (
            _divided(lists[rank], stages=stages, left_out=left_out)
            if schedule in ZERO_BUBBLE_SCHEDULES
            else _of_rank(lists[rank], rank, pp=pp, stages=stages, left_out=left_out)
            if virtual_stages > 1
            else (
                *_of_rank(lists[rank], rank, pp=pp, stages=stages, left_out=left_out),
                _around(rank, pp, num_microbatches),
            )
        )
    )


def _around(rank: int, pp: int, num_microbatches: int) -> Path:
    """The path that goes to the end, back to a rank, stays there, and goes to the end again."""
    counts = [1 if stage < rank else 2 for stage in range(pp)]
    counts[rank] = num_microbatches - (pp - 1 - rank)
    return Path(forwards=tuple(counts), backwards=tuple(counts))


def _in_phases(rank: int, pp: int, num_microbatches: int) -> tuple[Path, Path, Path]:
    """All of a rank, and twice both phases, where all forwards come before all backwards."""
    before = [int(stage < rank) for stage in range(pp)]
    through = [1] * pp
    before[rank] = through[rank] = num_microbatches
    both = Path(forwards=tuple(through), backwards=tuple(through))
    return Path(forwards=tuple(before), backwards=tuple(before)), both, both


def _of_rank(
    row: Actions, rank: int, *, pp: int, stages: int, left_out: int
) -> tuple[Path, Path, Path]:
    """All of a rank, its fill, its drain.

    Args:
        row: Its actions, from which ``left_out`` microbatches of the steady part are missing.
        rank: The rank.
        pp: Pipeline ranks.
        stages: Stages in all.
        left_out: Microbatches.
    """
    mine = range(rank, stages, pp)
    last = mine[-1]
    first_backward, last_forward = _turns(row)
    behind, ahead = Counter(row[first_backward:]), Counter(row[:last_forward])
    number = row.count((rank, "F")) + left_out
    busy = [1] * rank + [0] * (stages - rank)
    around = [*busy[: last + 1], *[1] * (stages - 1 - last)]
    later, earlier = [1] * stages, [1] * stages
    for stage in mine:
        busy[stage] = around[stage] = number
        later[stage] += left_out + behind[stage, "F"]
        earlier[stage] += left_out + sum(ahead[stage, what] for what in _PARTS if what != "F")
    return (
        Path(forwards=tuple(busy), backwards=tuple(busy)),
        Path(forwards=tuple(later), backwards=tuple(around)),
        Path(forwards=tuple(around), backwards=tuple(earlier)),
    )


def _turns(row: Actions) -> tuple[int, int]:
    """Places of a rank's first backward and of its last forward."""
    first_backward = next(at for at, (_, what) in enumerate(row) if what != "F")
    behind = next(at for at, (_, what) in enumerate(reversed(row), 1) if what == "F")
    return first_backward, len(row) - behind


def _divided(row: Actions, *, stages: int, left_out: int) -> tuple[Path, Path, Path]:
    """The same of a rank whose backwards are divided; nobody waits for their second parts."""
    mine = {stage for stage, _ in row}
    first_backward, last_forward = _turns(row)
    begins, ends = row[first_backward][0], row[last_forward][0]
    before: Actions = tuple((stage, "F") for stage in range(min(mine)))
    there: Actions = tuple((stage, "F") for stage in range(stages))
    back: Actions = tuple((stage, "I" if stage else "B") for stage in reversed(range(stages)))
    whole: tuple[Pass, ...] = ("F", "B")
    middle: Actions = tuple((stage, what) for stage in mine for what in whole) * left_out
    around = (*back[: stages - 1 - begins], *row[first_backward:])
    return (
        _counted((*before, *row, *middle), stages),
        _counted((*there, *around, *middle), stages),
        _counted((*before, *row[: last_forward + 1], *middle, *there[ends + 1 :], *back), stages),
    )


def _counted(actions: Actions, stages: int) -> Path:
    """The path that takes some actions."""
    counts = [[0] * stages for _ in range(3)]
    for stage, what in actions:
        for part in _PARTS[what]:
            counts[part][stage] += 1
    forwards, backwards, weights = map(tuple, counts)
    return Path(forwards=forwards, backwards=backwards, weights=weights)


@lru_cache(maxsize=4096)
def mean_paths(
    schedule: str, pp: int, virtual_stages: int, num_microbatches: int
) -> NDArray[np.float64]:
    """Means over the ranks of their paths: (path, part of ``Path.counts``, stage)."""
    paths = _paths(schedule, pp, virtual_stages, num_microbatches)
    counts = np.array([path.counts for path in paths], dtype=float)
    if len(paths) == 1:
        return counts
    means: NDArray[np.float64] = counts.reshape(pp, -1, *counts.shape[1:]).mean(axis=0)
    return means


@lru_cache(maxsize=65536)
def _least_passes(schedule: str, pp: int, virtual_stages: int, num_microbatches: int) -> float:
    means = mean_paths(schedule, pp, virtual_stages, num_microbatches)
    parts = means if schedule in ZERO_BUBBLE_SCHEDULES else means[:, :2]
    return float(parts.min(axis=(1, 2)).max())


def least_passes(configuration: Configuration) -> float:
    """Passes of a microbatch through all units that no cut avoids, whatever its passes divide into.

    With all of the model in the stage that counts least, and in the part of it that does.
    """
    return _least_passes(
        configuration.schedule,
        configuration.degrees.pp,
        configuration.virtual_stages,
        configuration.num_microbatches,
    )


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
    means = mean_paths(
        configuration.schedule,
        configuration.degrees.pp,
        configuration.virtual_stages,
        configuration.num_microbatches,
    )
    # Every stage takes its least, the stage that counts least takes the rest.
    least = np.array(least_parts_s)
    rest_s = np.array(parts_s) - least * means.shape[2]
    seconds = means.sum(axis=2) @ least + means.min(axis=2) @ rest_s
    if transfers_s is not None:
        seconds = seconds + means[:, :2].sum(axis=1) @ np.array(transfers_s) / 2
    return float(seconds.max())
