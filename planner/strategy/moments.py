"""What a pipeline rank holds of a step at one moment, and the moments at which it is fullest."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from planner.strategy.schedules import Actions, actions_by_rank, shortened, stages_of_rank
from planner.vocabulary import ZERO_BUBBLE_SCHEDULES, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMoment:
    """What a stage holds at one moment of a schedule, beside what it always holds."""

    in_flight: int
    """Microbatches whose activations it holds, those that wait apart."""
    is_ending: bool = False
    """Whether the backward of one of them ends: it has one block to go."""
    follows_backward: bool = False
    """Whether a backward has changed what is gathered: under FSDP with resharding all parameters
    of a pipeline's stage stay gathered from there to the next forward; without a pipeline they go
    with the blocks of a single microbatch."""
    has_gradients: bool = False
    """Whether it holds gradients of backwards before."""
    waiting: int = 0
    """Microbatches of which the weights' part of the backward is left: it holds their activations,
    and gradients."""
    is_dividing: bool = False
    """Whether the first part of a divided backward ends: nothing is gone yet of what goes with
    it."""
    has_new_gradients: bool = False
    """Whether gradients of the last weights' part are still in the compute dtype: FSDP adds them
    to those before when the next backward comes."""
    is_running: bool = True
    """Whether it runs then: others of its rank have nothing but what they keep."""


_SOME = 4
"""Moments that tell nearly as much as all."""

RankMoment = tuple[StageMoment, ...]
"""A moment of all stages of a rank, in model order."""

Moments = NDArray[np.int16]
"""The same of several moments: (moment, stage of the rank, field of a ``StageMoment``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMoves:
    """What of a stage's state comes and goes during a step."""

    reshards: bool = False
    """Whether a forward leaves parameters sharded that a backward leaves gathered."""
    accumulates: bool = False
    """Whether memory for gradients is there from the first backward on alone."""


MeanStarts = tuple[tuple[float, ...], tuple[float, ...]]
"""By stage: microbatches in flight; and how often there are gradients of earlier ones."""


def mean_starts(
    schedule: str, *, pp: int, virtual_stages: int, num_microbatches: int, moves: StateMoves
) -> MeanStarts:
    """Of each stage, the mean over those fullest moments when a backward of its rank starts."""
    short = shortened(
        schedule, pp=pp, virtual_stages=virtual_stages, num_microbatches=num_microbatches
    )
    return _mean_starts(schedule, pp, virtual_stages, short, moves)


@cache
def _mean_starts(
    schedule: str, pp: int, virtual_stages: int, num_microbatches: int, moves: StateMoves
) -> MeanStarts:
    stages = pp * virtual_stages
    counts, shares = [0.0] * stages, [0.0] * stages
    for rank in range(pp):
        moments = _rows(schedule, pp, virtual_stages, num_microbatches, rank, moves)
        in_flight, is_ending, _, has_gradients, *_ = np.moveaxis(moments, 2, 0)
        starts = ~is_ending.any(axis=1)
        mine = stages_of_rank(schedule, rank, pp=pp, num_stages=stages)
        for local, stage in enumerate(mine):
            counts[stage] = float(in_flight[starts, local].mean())
            shares[stage] = float(has_gradients[starts, local].mean())
    return tuple(counts), tuple(shares)


def fullest_moments(
    schedule: str,
    *,
    pp: int,
    virtual_stages: int,
    num_microbatches: int,
    rank: int,
    moves: StateMoves,
) -> tuple[RankMoment, ...]:
    """Moments at which a rank may hold most: each backward when it starts and when it ends.

    Of a divided one, that is its first part. Its second part frees what it has read bit by bit. Of
    ranks with several stages also the end of each forward: another stage may take more for a while.

    Returns:
        No other moment holds as much or more on every stage than one of these.
    """
    short = shortened(
        schedule, pp=pp, virtual_stages=virtual_stages, num_microbatches=num_microbatches
    )
    return _moments(schedule, pp, virtual_stages, short, rank, moves)


def moment_rows(
    schedule: str,
    *,
    pp: int,
    virtual_stages: int,
    num_microbatches: int,
    rank: int,
    moves: StateMoves,
) -> Moments:
    """``fullest_moments`` as an array."""
    short = shortened(
        schedule, pp=pp, virtual_stages=virtual_stages, num_microbatches=num_microbatches
    )
    return _rows(schedule, pp, virtual_stages, short, rank, moves)


def some_moments(
    schedule: str, *, pp: int, virtual_stages: int, num_microbatches: int, moves: StateMoves
) -> NDArray[np.float64]:
    """Of each rank, the mean of its fullest moments, and some of them.

    Returns:
        As ``Moments``, with an axis of ranks in front.
    """
    short = shortened(
        schedule, pp=pp, virtual_stages=virtual_stages, num_microbatches=num_microbatches
    )
    return _some(schedule, pp, virtual_stages, short, moves)


@cache
def _some(
    schedule: str, pp: int, virtual_stages: int, num_microbatches: int, moves: StateMoves
) -> NDArray[np.float64]:
    found = []
    for rank in range(pp):
        rows = _rows(schedule, pp, virtual_stages, num_microbatches, rank, moves)
        some = np.linspace(0, len(rows) - 1, _SOME).round().astype(int)
        found.append([rows.mean(axis=0), *rows[some]])
    return np.array(found, dtype=float)


@cache
def _moments(
    schedule: str,
    pp: int,
    virtual_stages: int,
    num_microbatches: int,
    rank: int,
    moves: StateMoves,
) -> tuple[RankMoment, ...]:
    """``fullest_moments`` of a list that is as short as may be."""
    rows = _rows(schedule, pp, virtual_stages, num_microbatches, rank, moves)
    return tuple(map(rank_moment, rows))


@cache
def _rows(
    schedule: str,
    pp: int,
    virtual_stages: int,
    num_microbatches: int,
    rank: int,
    moves: StateMoves,
) -> Moments:
    """The same as an array."""
    if schedule == Schedule.NONE:
        alone = num_microbatches == 1
        starts = StageMoment(in_flight=1, has_gradients=moves.accumulates and not alone)
        # Gradients come block by block, and may be more than what goes; those of the first units,
        # such as a table's, when hardly any activation is left.
        ends = replace(starts, is_ending=True, has_gradients=True, follows_backward=alone)
        return _as_rows([starts, ends] if moves.accumulates else [starts])
    if schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B):
        most = num_microbatches
        if schedule == Schedule.ONE_F_ONE_B:
            most = min(num_microbatches, pp - rank)
        has_gradients = moves.accumulates and num_microbatches > most
        starts = StageMoment(in_flight=most, has_gradients=has_gradients)
        ends = replace(
            starts, is_ending=True, follows_backward=moves.reshards, has_gradients=moves.accumulates
        )
        after = replace(ends, in_flight=most - 1, is_ending=False)
        return _fullest(_as_rows([starts, ends, after] if most > 1 else [starts, ends]))
    rows = actions_by_rank(
        schedule, pp=pp, virtual_stages=virtual_stages, num_microbatches=num_microbatches
    )
    divides = schedule in ZERO_BUBBLE_SCHEDULES
    found = _divided_backwards if divides else _backwards
    return _fullest(found(rows[rank], pp, virtual_stages, moves))


def _as_rows(moments: Sequence[StageMoment]) -> Moments:
    """Moments of a rank with one stage."""
    return np.array([[astuple(each)] for each in moments], dtype=np.int16)


def rank_moment(row: NDArray[np.int16]) -> RankMoment:
    """One of ``Moments``."""
    return tuple(map(_moment, row.tolist()))


def _moment(numbers: Sequence[int]) -> StageMoment:
    in_flight, is_ending, follows_backward, has_gradients, *others = numbers
    waiting, is_dividing, is_new, is_running = others
    return StageMoment(
        in_flight=in_flight,
        is_ending=bool(is_ending),
        follows_backward=bool(follows_backward),
        has_gradients=bool(has_gradients),
        waiting=waiting,
        is_dividing=bool(is_dividing),
        has_new_gradients=bool(is_new),
        is_running=bool(is_running),
    )


def _backwards(row: Actions, pp: int, virtual_stages: int, moves: StateMoves) -> Moments:
    """Every backward of a rank when it starts and when it ends, every forward when it ends."""
    local = np.array([stage for stage, _ in row]) // pp
    is_forward = np.array([what == "F" for _, what in row])
    acts = local[:, None] == np.arange(virtual_stages)
    starts_back = acts & ~is_forward[:, None]
    steps = np.where(is_forward, 1, -1)[:, None] * acts
    found = np.zeros((len(row), 2, virtual_stages, len(fields(StageMoment))), dtype=np.int16)
    in_flight, is_ending, follows_backward, has_gradients, *_, runs = np.moveaxis(found, 3, 0)
    in_flight[:] = (np.cumsum(steps, axis=0) - np.where(is_forward[:, None], 0, steps))[:, None]
    runs[:] = acts[:, None]
    if moves.accumulates:
        has_gradients[:] = (np.cumsum(starts_back, axis=0) > starts_back)[:, None]
    if moves.reshards:
        last = np.maximum.accumulate(np.where(acts, np.arange(len(row))[:, None], -1), axis=0)
        last = np.vstack([np.full((1, virtual_stages), -1), last[:-1]])
        follows_backward[:] = ((last >= 0) & ~is_forward[last] & ~acts)[:, None]
        follows_backward[~is_forward] |= ((last >= 0) & ~is_forward[last])[~is_forward, None]
    ends = np.flatnonzero(~is_forward), 1, local[~is_forward]
    is_ending[ends] = True
    follows_backward[ends], has_gradients[ends] = moves.reshards, moves.accumulates
    return found.reshape(-1, virtual_stages, found.shape[3])


def _divided_backwards(row: Actions, pp: int, virtual_stages: int, moves: StateMoves) -> Moments:
    """The same where some backwards come in two parts; parameters are never resharded."""
    now = [StageMoment(in_flight=0)] * virtual_stages
    found: list[list[StageMoment]] = []
    for stage, what in row:
        local = stage // pp
        held = now[local]
        if what == "F":
            now[local] = replace(held, in_flight=held.in_flight + 1)
            found.append(_while(now, local))
            continue
        if what == "W":
            now[local] = replace(
                held,
                waiting=held.waiting - 1,
                has_gradients=moves.accumulates,
                has_new_gradients=moves.accumulates,
            )
            continue
        found.append(_while(now, local))
        if what == "B":
            ends = replace(
                held, is_ending=True, has_gradients=moves.accumulates, has_new_gradients=False
            )
            after = replace(ends, in_flight=held.in_flight - 1, is_ending=False)
        else:
            ends = replace(
                held,
                in_flight=held.in_flight - 1,
                waiting=held.waiting + 1,
                is_dividing=True,
                has_new_gradients=False,
            )
            after = replace(ends, is_dividing=False)
        now[local] = ends
        found.append(_while(now, local))
        now[local] = after
    return np.array([[astuple(each) for each in moment] for moment in found], dtype=np.int16)


def _while(now: Sequence[StageMoment], running: int) -> list[StageMoment]:
    """What the stages of a rank hold while one of them runs."""
    return [replace(each, is_running=at == running) for at, each in enumerate(now)]


def _fullest(moments: Moments) -> Moments:
    """Moments without those that hold no more than another on any stage, each once."""
    data, width = moments.tobytes(), moments[0].nbytes
    places = reversed(range(len(moments)))
    first = {data[place * width : (place + 1) * width]: place for place in places}
    distinct = moments[sorted(first.values())]
    in_flight, is_ending, follows_backward, has_gradients, *divided = np.moveaxis(distinct, 2, 0)
    sizes = [in_flight, in_flight - is_ending, -is_ending, follows_backward, has_gradients]
    waiting, is_dividing, is_new, is_running = divided
    sizes += [waiting, is_dividing, -is_dividing, is_new, is_running]
    size = np.hstack(sizes)
    size = size[:, size.min(axis=0) < size.max(axis=0)]
    # What holds as much as another on every stage holds more in all: the fullest come first.
    left = np.argsort(-size.sum(axis=1, dtype=np.int64), kind="stable")
    size = size[left]
    found: list[int] = []
    while len(left):
        found.append(left[0])
        is_more = (size > size[0]).any(axis=1)
        left, size = left[is_more], size[is_more]
    fullest: Moments = distinct[sorted(found)]
    return fullest
