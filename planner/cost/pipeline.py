"""The time of a pipeline: its schedule's own action list, run against a clock.

A forward of stage s waits for the same microbatch's forward of stage s - 1, a backward for that
of stage s + 1 (on the last stage for its own forward), and a rank runs its list in order. Where a
backward is divided, its first part waits and is waited for, and its second part is waited for by
nobody. This is the longest path through the list, and the one time of a pipeline: search, estimate,
report and validation all take it from here.

Lists are long and repeat themselves. Each action depends on actions of a few microbatches before
it, so that once all of these lie one period later by the same time, every action to come does so
too, until the forwards run out. A shorter list with such a stretch in it tells the time of the
whole one exactly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from planner.cost.zero_bubble import zero_bubble_s
from planner.strategy.schedules import Actions, Pass, actions_by_rank, microbatches_per_round
from planner.vocabulary import Schedule

SPLIT_SCHEDULES: Mapping[str, int] = {Schedule.ZB_1P: 1, Schedule.ZB_2P: 2}
"""Zero-bubble schedules of other frameworks, and how many times 1F1B's microbatches a rank may
hold."""

_WINDOW = 4
"""Groups of microbatches that must repeat: more than any action of a list looks back."""
_TAIL = 2
"""Groups of microbatches at the end whose backwards run when the forwards have run out."""
_ROUNDING = 1e-12
"""Two times of this relative difference are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimes:
    """What all microbatches of a step take."""

    step_s: float
    """From the first forward to the last backward."""
    in_flight: tuple[int, ...] | None = None
    """Microbatches that each rank holds at most, for SPLIT_SCHEDULES."""


def pipeline_times(
    schedule: str,
    *,
    pp: int,
    num_microbatches: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    weight_backward_s: Sequence[float] | None = None,
) -> PipelineTimes:
    """Time all microbatches of a step.

    Args:
        schedule: A name that ``get_schedule_class`` takes, "none", or one of SPLIT_SCHEDULES.
        pp: Pipeline ranks.
        num_microbatches: Microbatches per step.
        forward_s: Forward of one microbatch, transfers included, by stage in model order.
        backward_s: Backward of one microbatch likewise.
        weight_backward_s: The part of it that only the parameters' gradients need; for schedules
            that divide backwards.
    """
    if schedule in SPLIT_SCHEDULES:
        assert weight_backward_s is not None
        return _split(
            schedule,
            pp=pp,
            num_microbatches=num_microbatches,
            forward_s=forward_s,
            backward_s=backward_s,
            weight_backward_s=weight_backward_s,
        )
    return PipelineTimes(
        step_s=pipeline_s(
            schedule,
            pp=pp,
            num_microbatches=num_microbatches,
            forward_s=forward_s,
            backward_s=backward_s,
            weight_backward_s=weight_backward_s,
        ),
    )


def pipeline_s(
    schedule: str,
    *,
    pp: int,
    num_microbatches: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    weight_backward_s: Sequence[float] | None = None,
) -> float:
    """Seconds of all microbatches under a schedule of torch, as in ``pipeline_times``."""
    if schedule == Schedule.NONE:
        return num_microbatches * (forward_s[0] + backward_s[0])
    if schedule == Schedule.GPIPE:
        # All forwards come first, and each half goes at the pace of a slowest stage of its own.
        slowest_s = max(forward_s) + max(backward_s)
        return sum(forward_s) + sum(backward_s) + (num_microbatches - 1) * slowest_s
    virtual_stages = len(forward_s) // pp
    group, reach = 1, pp
    if virtual_stages > 1:
        group = microbatches_per_round(schedule, pp, num_microbatches)
        reach = max(group, 2 * pp)
    number = 2 * (_WINDOW + _TAIL) * reach
    durations = _durations(forward_s, backward_s, weight_backward_s)
    while True:
        number += (num_microbatches - number) % group
        if number >= num_microbatches:
            return max(_done_s(schedule, pp, virtual_stages, num_microbatches, durations))
        done_s = _done_s(schedule, pp, virtual_stages, number, durations)
        places = _places(schedule, pp, virtual_stages, number)
        shift_s = _steady_shift_s(done_s, places, group=group, reach=reach)
        if shift_s is not None:
            return max(done_s) + (num_microbatches - number) // group * shift_s
        number *= 4


def _durations(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    weight_backward_s: Sequence[float] | None,
) -> tuple[float, ...]:
    """Seconds of each thing that an action list names, as ``_Wired`` numbers them."""
    weight_s = [0.0] * len(forward_s) if weight_backward_s is None else weight_backward_s
    input_s = [b - w for b, w in zip(backward_s, weight_s, strict=True)]
    return (*forward_s, *backward_s, *input_s, *weight_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """A path through an action list: how often it takes each stage's forward and backward.

    What its actions take together is a lower bound on the time of the list, whatever they take.
    """

    forwards: tuple[float, ...]
    """By stage in model order; parts of one where ranks share cores (``shared_cores``)."""
    backwards: tuple[float, ...]
    """Whole backwards, or of divided ones the first part, by stage in model order."""
    weights: tuple[float, ...] | None = None
    """Whole backwards, or of divided ones the part for the weights; None where it is the same."""

    @property
    def counts(self) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        """How often it takes forwards, and the two parts of backwards, by stage."""
        return self.forwards, self.backwards, self.weights or self.backwards

    def __add__(self, other: "Path") -> "Path":
        """What both take, one after the other."""
        forwards, backwards, weights = (
            tuple(map(sum, zip(mine, theirs, strict=True)))
            for mine, theirs in zip(self.counts, other.counts, strict=True)
        )
        return Path(forwards=forwards, backwards=backwards, weights=weights)

    def times(self, share: float) -> "Path":
        """The same with a share of each count."""
        forwards, backwards, weights = (tuple(n * share for n in each) for each in self.counts)
        return Path(forwards=forwards, backwards=backwards, weights=weights)

    def seconds(
        self,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        weight_backward_s: Sequence[float] | None = None,
    ) -> float:
        """What its actions take together."""
        weight_s = [0.0] * len(forward_s) if weight_backward_s is None else weight_backward_s
        input_s = [b - w for b, w in zip(backward_s, weight_s, strict=True)]
        return sum(
            n * s
            for counts, part_s in zip(self.counts, (forward_s, input_s, weight_s), strict=True)
            for n, s in zip(counts, part_s, strict=True)
        )


def longest_path(
    schedule: str,
    *,
    pp: int,
    num_microbatches: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    weight_backward_s: Sequence[float] | None = None,
) -> Path:
    """The path that sets the time of an action list, as ``pipeline_s`` takes it."""
    stages = len(forward_s)
    counts = [0] * (4 * stages)
    if schedule == Schedule.NONE:
        counts = [num_microbatches, num_microbatches, 0, 0]
    else:
        durations = _durations(forward_s, backward_s, weight_backward_s)
        key = schedule, pp, stages // pp, num_microbatches
        wired, done = _wired(*key), _done_s(*key, durations)
        before = _before(wired, pp)
        at = max(range(len(done)), key=done.__getitem__)
        while at >= 0:
            _, what, source = wired[at]
            counts[what] += 1
            previous = before[at]
            waits = source >= 0 and (previous < 0 or done[source] > done[previous])
            at = source if waits else previous
    forwards, wholes, inputs, weights = (counts[i * stages : (i + 1) * stages] for i in range(4))
    return Path(
        forwards=tuple(forwards),
        backwards=tuple(a + b for a, b in zip(wholes, inputs, strict=True)),
        weights=tuple(a + b for a, b in zip(wholes, weights, strict=True)),
    )


def _before(wired: Sequence["_Wired"], pp: int) -> list[int]:
    """Position of the action before each on its rank, -1 for the first."""
    latest = [-1] * pp
    before = []
    for position, (rank, _, _) in enumerate(wired):
        before.append(latest[rank])
        latest[rank] = position
    return before


def _steady_shift_s(
    done_s: Sequence[float], places: Sequence[Sequence[int]], *, group: int, reach: int
) -> float | None:
    """Time by which a group of microbatches ends later than the one before it.

    Returns:
        None where this differs between actions or within the window: not yet steady.
    """
    end = len(places[0]) - _TAIL * reach
    shift_s = done_s[places[0][end - 1]] - done_s[places[0][end - 1 - group]]
    most = _ROUNDING * max(done_s)
    for place in places:
        for index in range(end - _WINDOW * reach, end):
            found_s = done_s[place[index]] - done_s[place[index - group]]
            if abs(found_s - shift_s) > most:
                return None
    return shift_s


def _done_s(
    schedule: str,
    pp: int,
    virtual_stages: int,
    num_microbatches: int,
    durations: Sequence[float],
) -> list[float]:
    """When each action ends, in the order of ``_wired``."""
    clock = [0.0] * pp
    done: list[float] = []
    for rank, what, source in _wired(schedule, pp, virtual_stages, num_microbatches):
        start = clock[rank]
        if source >= 0 and done[source] > start:
            start = done[source]
        start += durations[what]
        clock[rank] = start
        done.append(start)
    return done


_Wired = tuple[int, int, int]
"""Rank; stage, with as many times the number of stages added as _NUMBERS says; position of the
action whose output it reads, -1 for none."""

_NUMBERS: Mapping[Pass, int] = {"F": 0, "B": 1, "I": 2, "W": 3}


@lru_cache(maxsize=64)
def _wired(
    schedule: str, pp: int, virtual_stages: int, num_microbatches: int
) -> tuple[_Wired, ...]:
    """All actions in an order in which each comes after those that it waits for."""
    lists = actions_by_rank(
        schedule, pp=pp, virtual_stages=virtual_stages, num_microbatches=num_microbatches
    )
    return _wire(lists, pp * virtual_stages)


@lru_cache(maxsize=64)
def _places(
    schedule: str, pp: int, virtual_stages: int, num_microbatches: int
) -> tuple[tuple[int, ...], ...]:
    """Positions in ``_wired`` of each stage's actions of a kind, by microbatch.

    Whole backwards and the first parts of divided ones are of one kind.
    """
    stages = pp * virtual_stages
    places: list[list[int]] = [[] for _ in range(4 * stages)]
    for position, (_, what, _) in enumerate(_wired(schedule, pp, virtual_stages, num_microbatches)):
        kind, stage = divmod(what, stages)
        places[stage + stages * (1 if kind == _NUMBERS["I"] else kind)].append(position)
    return tuple(tuple(place) for place in places if len(place) == num_microbatches)


def _wire(lists: Sequence[Actions], stages: int) -> tuple[_Wired, ...]:
    wired: list[_Wired] = []
    forwards: list[list[int]] = [[] for _ in range(stages)]
    backwards: list[list[int]] = [[] for _ in range(stages)]
    position = [0] * len(lists)
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(lists):
            while position[rank] < len(row):
                stage, what = row[position[rank]]
                source = -1
                if what != "W":
                    # Forward of the stage before, backward of the one behind, or, for the last
                    # backward, the last forward.
                    mine = forwards if what == "F" else backwards
                    feeder = None if stage == 0 else forwards[stage - 1]
                    if what != "F":
                        feeder = forwards[stage] if stage == stages - 1 else backwards[stage + 1]
                    microbatch = len(mine[stage])
                    if feeder is not None:
                        if microbatch >= len(feeder):
                            break
                        source = feeder[microbatch]
                    mine[stage].append(len(wired))
                wired.append((rank, _NUMBERS[what] * stages + stage, source))
                position[rank] += 1
                progress = True
    assert all(place == len(row) for place, row in zip(position, lists, strict=True))
    return tuple(wired)


def _split(
    schedule: str,
    *,
    pp: int,
    num_microbatches: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    weight_backward_s: Sequence[float],
) -> PipelineTimes:
    split = zero_bubble_s(
        forward_s=forward_s,
        input_backward_s=[b - w for b, w in zip(backward_s, weight_backward_s, strict=True)],
        weight_backward_s=weight_backward_s,
        num_microbatches=num_microbatches,
        limit=SPLIT_SCHEDULES[schedule] * pp,
    )
    return PipelineTimes(step_s=split.step_s, in_flight=split.in_flight)
