"""The time of a pipeline whose ranks may share cores.

A rank's times are those that it takes while all ranks of its node run. Where k of them share a core
and one waits for another, the others have its share. No action list is then faster than its longest
path with the ranks of one stage alone on the cores, pp times fewer of them,

    L = longest path / min(k, pp)

nor than all work of a node's cores, with what of them is idle whatever the ranks do:

    W = sum over stages s of (m / pp + max(0, 1 / k - (s + 1) / pp)) (F[s] + B[s])

Until stage s has done its first forward, and once it has done its last backward, no more than the
ranks of s + 1 stages run: that is the second term. Cores that are shared out evenly take the longer
of the two where it is much longer. Where they are alike, what runs beside the longest path takes
from its cores: 8% more in the median. So

    max(L, W, JOINT (L + W))

which is linear in what stages take along each of its paths: to the search, paths as others.
"""

from collections.abc import Iterator, Sequence

from planner.cost.pipeline import Path, PipelineTimes, longest_path, pipeline_times
from planner.strategy.configuration import Configuration

JOINT = 0.56
"""Fitted to random pipelines on cores that are played out; others are off by 1% in the median, 95%
of them within 6% (``tests/cost/test_shared_cores.py``)."""


def joint_s(list_s: float, work_s: float) -> float:
    """What a pipeline takes.

    Args:
        list_s: Its longest path, as it is while others wait.
        work_s: All work of its cores, 0 where each rank has one of its own.
    """
    return max(list_s, work_s, JOINT * (list_s + work_s))


def times_of(
    configuration: Configuration,
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    weight_backward_s: Sequence[float] | None = None,
) -> PipelineTimes:
    """Time all microbatches of a step (``pipeline_times``)."""
    times = pipeline_times(
        configuration.schedule,
        pp=configuration.degrees.pp,
        num_microbatches=configuration.num_microbatches,
        forward_s=forward_s,
        backward_s=backward_s,
        weight_backward_s=weight_backward_s,
    )
    if not configuration.shares_cores:
        return times
    work_s = work_path(configuration).seconds(forward_s, backward_s, weight_backward_s)
    step_s = joint_s(times.step_s * configuration.waiting_share, work_s)
    return PipelineTimes(step_s=step_s, in_flight=times.in_flight)


def path_of(
    configuration: Configuration,
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    weight_backward_s: Sequence[float] | None = None,
) -> Path:
    """The path that sets the time of all microbatches (``longest_path``)."""
    path = longest_path(
        configuration.schedule,
        pp=configuration.degrees.pp,
        num_microbatches=configuration.num_microbatches,
        forward_s=forward_s,
        backward_s=backward_s,
        weight_backward_s=weight_backward_s,
    )
    paths = on_cores(configuration, [path])
    return max(paths, key=lambda each: each.seconds(forward_s, backward_s, weight_backward_s))


def on_cores(configuration: Configuration, paths: Sequence[Path]) -> tuple[Path, ...]:
    """What some paths through the action list make: themselves, or all paths on shared cores."""
    if not configuration.shares_cores:
        return tuple(paths)
    return tuple(_on_shared_cores(configuration, paths))


def _on_shared_cores(configuration: Configuration, paths: Sequence[Path]) -> Iterator[Path]:
    work = work_path(configuration)
    yield work
    for path in paths:
        alone = path.times(configuration.waiting_share)
        yield alone
        yield (alone + work).times(JOINT)


def work_path(configuration: Configuration) -> Path:
    """All work of the cores of a node, and what of them is idle whatever its ranks do."""
    pp, on_core = configuration.degrees.pp, configuration.ranks_per_core
    busy = configuration.work_passes
    idle = (max(0.0, 1 / on_core - (s + 1) / pp) for s in range(configuration.num_stages))
    both = tuple(busy + each for each in idle)
    if configuration.divides_backward:  # at the end, backwards for weights fill what is idle
        return Path(forwards=both, backwards=(busy,) * len(both))
    return Path(forwards=both, backwards=both)
