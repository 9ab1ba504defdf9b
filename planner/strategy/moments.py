"""What a pipeline rank holds of a step at one moment, and the moments at which it is fullest."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from planner.strategy.schedules import Actions, actions_by_rank, shortened
from planner.vocabulary import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMoment:
    """What a stage holds at one moment of a schedule, beside what it always holds."""

    in_flight: int
    """Microbatches whose activations it holds."""
    is_ending: bool = False
    """Whether the backward of one of them ends: it has one block to go."""
    follows_backward: bool = False
    """Whether a backward was the last that it did: under FSDP with resharding all its parameters
    stay gathered from there to the next forward."""
    has_gradients: bool = False
    """Whether it holds gradients of backwards before."""


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
        moments = _moments(schedule, pp, virtual_stages, num_microbatches, rank, moves)
        starts = [moment for moment in moments if not any(held.is_ending for held in moment)]
        for local, stage in enumerate(range(rank, stages, pp)):
            counts[stage] = sum(moment[local].in_flight for moment in starts) / len(starts)
            shares[stage] = sum(moment[local].has_gradients for moment in starts) / len(starts)
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

    Returns:
        No other moment holds as much or more on every stage than one of these.
    """
    short = shortened(
        schedule, pp=pp, virtual_stages=virtual_stages, num_microbatches=num_microbatches
    )
    return _moments(schedule, pp, virtual_stages, short, rank, moves)


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
    if schedule == Schedule.NONE:
        return (
            (StageMoment(in_flight=1, has_gradients=moves.accumulates and num_microbatches > 1),),
        )
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
        held = [starts, ends, after] if most > 1 else [starts, ends]
        found = np.array([[astuple(each)] for each in held], dtype=np.int16)
    else:
        rows = actions_by_rank(
            schedule, pp=pp, virtual_stages=virtual_stages, num_microbatches=num_microbatches
        )
        found = _backwards(rows[rank], pp, virtual_stages, moves)
    return tuple(tuple(map(_moment, moment)) for moment in _fullest(found).tolist())


def _moment(fields: Sequence[int]) -> StageMoment:
    in_flight, is_ending, follows_backward, has_gradients = fields
    return StageMoment(
        in_flight=in_flight,
        is_ending=bool(is_ending),
        follows_backward=bool(follows_backward),
        has_gradients=bool(has_gradients),
    )


def _backwards(row: Actions, pp: int, virtual_stages: int, moves: StateMoves) -> Moments:
    """Every backward of a rank when it starts and when it ends."""
    stages, is_forward = (np.array(each) for each in zip(*row, strict=True))
    acts = (stages // pp)[:, None] == np.arange(virtual_stages)
    starts_back = acts & ~is_forward[:, None]
    steps = np.where(is_forward, 1, -1)[:, None] * acts
    last = np.maximum.accumulate(np.where(acts, np.arange(len(row))[:, None], -1), axis=0)
    last = np.vstack([np.full((1, virtual_stages), -1), last[:-1]])
    follows = (last >= 0) & ~is_forward[last]
    has_gradients = np.cumsum(starts_back, axis=0) > starts_back
    starts = np.stack(
        [
            np.cumsum(steps, axis=0) - steps,
            np.zeros_like(steps),
            follows * moves.reshards,
            has_gradients * moves.accumulates,
        ],
        axis=2,
    )
    ended = np.array([0, 1, moves.reshards, moves.accumulates])
    ends = np.where(starts_back[:, :, None] & [False, True, True, True], ended, starts)
    both = np.stack([starts, ends], axis=1)[~is_forward].reshape(-1, virtual_stages, 4)
    found: Moments = both.astype(np.int16)
    return found


def _fullest(moments: Moments) -> Moments:
    """Moments without those that hold no more than another on any stage, each once."""
    first = {moment.tobytes(): place for place, moment in reversed(list(enumerate(moments)))}
    distinct = moments[sorted(first.values())]
    in_flight, is_ending, follows_backward, has_gradients = np.moveaxis(distinct, 2, 0)
    sizes = (in_flight, in_flight - is_ending, -is_ending, follows_backward, has_gradients)
    as_many = np.ones((len(distinct), len(distinct)), dtype=bool)
    for size in np.hstack(sizes).T.copy():
        if size.min() < size.max():
            as_many &= size[:, None] <= size
    fullest: Moments = distinct[as_many.sum(axis=1) == 1]  # by itself alone
    return fullest
