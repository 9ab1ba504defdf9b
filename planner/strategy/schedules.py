"""Pipeline schedules: their limits, their action lists and their fullest moments.

Names are those of ``torch.distributed.pipelining.schedules.get_schedule_class``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from planner.vocabulary import Schedule

Actions = tuple[tuple[int, bool], ...]
"""Actions of one rank in order: (stage, True for a forward, False for a backward)."""


def schedule_rule(
    schedule: str, *, pp: int, virtual_stages: int, num_microbatches: int
) -> str | None:
    """Limits of torch's schedule classes, and of what interleaving is good for.

    Returns:
        The rule that is broken, with its numbers, None where the schedule runs.
    """
    if schedule == Schedule.ONE_F_ONE_B and num_microbatches < pp:
        return f"1F1B needs microbatches >= stages, but {num_microbatches} < {pp}"
    if schedule == Schedule.INTERLEAVED:
        if num_microbatches < pp:
            return (
                f"Interleaved1F1B needs microbatches >= pipeline ranks to interleave, but "
                f"{num_microbatches} < {pp}"
            )
        rounds = num_microbatches // pp
        if num_microbatches % rounds:
            return (
                f"Interleaved1F1B needs microbatches % rounds == 0, but "
                f"{num_microbatches} % {rounds} = {num_microbatches % rounds}"
            )
    return None


def rank_of_stage(stage: int, pp: int) -> int:
    """Pipeline rank of a stage: stages go round the ranks."""
    return stage % pp


@cache
def actions_by_rank(
    schedule: str, *, pp: int, virtual_stages: int, num_microbatches: int
) -> tuple[Actions, ...]:
    """Order of forwards and backwards on every pipeline rank.

    1F1B (Narayanan et al. 2019, PipeDream-flush) runs min(m, stages left) forwards, then
    alternates; GPipe (Huang et al. 2019) all forwards, then all backwards; Interleaved1F1B
    (Narayanan et al. 2021) goes round the stages of a rank. The same orders as torch's schedule
    classes make, which take seconds for hundreds of stages.
    """
    if schedule == Schedule.INTERLEAVED:
        return tuple(_interleaved(rank, pp, virtual_stages, num_microbatches) for rank in range(pp))
    found: list[Actions] = []
    for rank in range(pp):
        warmup = (
            num_microbatches if schedule == Schedule.GPIPE else min(num_microbatches, pp - rank)
        )
        steady = ((rank, False), (rank, True)) * (num_microbatches - warmup)
        found.append(((rank, True),) * warmup + steady + ((rank, False),) * warmup)
    return tuple(found)


def _interleaved(rank: int, pp: int, virtual_stages: int, num_microbatches: int) -> Actions:
    """One rank under Interleaved1F1B: warm-up forwards, pairs, the remaining backwards.

    Microbatches go round the rank's stages in groups of ``group``; the warm-up covers all but
    the last stage for one group, and two more forwards for every rank behind this one.
    """
    group = num_microbatches // max(1, num_microbatches // pp)
    total = num_microbatches * virtual_stages
    warmup = min(total, (virtual_stages - 1) * group + 2 * (pp - 1 - rank))

    def stage(step: int) -> int:
        return (step // group) % virtual_stages * pp + rank

    forwards = [(stage(step), True) for step in range(total)]
    last = (virtual_stages - 1) * pp + 2 * rank
    backwards = [(last - stage(step), False) for step in range(total)]
    paired = total - warmup
    steady = [a for pair in zip(forwards[warmup:], backwards, strict=False) for a in pair]
    return tuple(forwards[:warmup] + steady + backwards[paired:])


def shortened(schedule: str, *, pp: int, virtual_stages: int, num_microbatches: int) -> int:
    """Microbatches of a shorter list that begins and ends like the whole one.

    A rank runs at most ``(virtual_stages - 1) * group + 2 * (pp - 1) + 1`` forwards before its
    first backward, and as many backwards after its last forward; what lies between repeats.
    """
    if schedule == Schedule.GPIPE:
        return num_microbatches
    group = pp
    if schedule == Schedule.INTERLEAVED:
        group = num_microbatches // max(1, num_microbatches // pp)
    return min(num_microbatches, 6 * group)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMoves:
    """What of a stage's state comes and goes during a step."""

    reshards: bool = False
    """Whether a forward leaves parameters sharded that a backward leaves gathered."""
    accumulates: bool = False
    """Whether memory for gradients is there from the first backward on alone."""


MeanStarts = tuple[tuple[float, ...], tuple[float, ...]]
"""By stage: microbatches in flight; and how often there are gradients of earlier ones."""


@cache
def mean_starts(
    schedule: str, *, pp: int, virtual_stages: int, num_microbatches: int, moves: StateMoves
) -> MeanStarts:
    """Of each stage, the mean over those fullest moments when a backward of its rank starts."""
    stages = pp * virtual_stages
    counts, shares = [0.0] * stages, [0.0] * stages
    for rank in range(pp):
        moments = fullest_moments(
            schedule, pp=pp, virtual_stages=virtual_stages, num_microbatches=num_microbatches,
            rank=rank, moves=moves,
        )  # fmt: skip
        starts = [moment for moment in moments if not any(held.is_ending for held in moment)]
        for local, stage in enumerate(range(rank, stages, pp)):
            counts[stage] = sum(moment[local].in_flight for moment in starts) / len(starts)
            shares[stage] = sum(moment[local].has_gradients for moment in starts) / len(starts)
    return tuple(counts), tuple(shares)


@cache
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
        ends = _ended(starts, moves)
        moments = [starts, ends]
        if most > 1:
            moments.append(_after_backward(starts, moves))
        return _fullest([(moment,) for moment in moments])
    rows = actions_by_rank(
        schedule,
        pp=pp,
        virtual_stages=virtual_stages,
        num_microbatches=shortened(
            schedule, pp=pp, virtual_stages=virtual_stages, num_microbatches=num_microbatches
        ),
    )
    now = [StageMoment(in_flight=0)] * virtual_stages
    seen: dict[RankMoment, None] = {}
    for stage, is_forward in rows[rank]:
        local = stage // pp
        held = now[local]
        if is_forward:
            now[local] = StageMoment(in_flight=held.in_flight + 1, has_gradients=held.has_gradients)
            continue
        seen[tuple(now)] = None
        seen[(*now[:local], _ended(held, moves), *now[local + 1 :])] = None
        now[local] = _after_backward(held, moves)
    return _fullest(list(seen))


def _ended(held: StageMoment, moves: StateMoves) -> StageMoment:
    """When the backward of a microbatch ends."""
    return StageMoment(
        in_flight=held.in_flight,
        is_ending=True,
        follows_backward=moves.reshards,
        has_gradients=moves.accumulates,
    )


def _after_backward(held: StageMoment, moves: StateMoves) -> StageMoment:
    return StageMoment(
        in_flight=held.in_flight - 1,
        follows_backward=moves.reshards,
        has_gradients=moves.accumulates,
    )


def _fullest(moments: Sequence[RankMoment]) -> tuple[RankMoment, ...]:
    """Moments without those that hold no more than another on any stage."""
    import numpy as np  # the command line reads this module before it knows what is asked

    vectors = np.array(
        [
            [
                number
                for held in moment
                for number in (
                    held.in_flight,
                    held.in_flight - held.is_ending,
                    not held.is_ending,
                    held.follows_backward,
                    held.has_gradients,
                )
            ]
            for moment in moments
        ]
    )
    as_many = (vectors[:, None] <= vectors[None, :]).all(axis=2)
    highest = as_many.sum(axis=1) == 1  # by itself alone
    return tuple(moments[place] for place in np.flatnonzero(highest).tolist())
