"""Pipeline schedules: their limits and their action lists.

Names are those of ``torch.distributed.pipelining.schedules.get_schedule_class``.
"""

from collections.abc import Iterator
from functools import cache
from typing import Literal

from planner.strategy.zero_bubble import dual_pipe_v, interleaved_zero_bubble, zbv
from planner.vocabulary import (
    PLANNED_SCHEDULES,
    SHARED_SCHEDULES,
    UNASKED_SCHEDULES,
    V_SCHEDULES,
    ZERO_BUBBLE_SCHEDULES,
    Recomputation,
    Schedule,
)

Pass = Literal["F", "B", "I", "W"]
"""Forward, backward; or of a backward the part that the stage before waits for, and the part that
only parameters' gradients need."""

Actions = tuple[tuple[int, Pass], ...]
"""Actions of one rank in order: stage, and what it runs."""


def schedule_rule(
    schedule: str, *, pp: int, virtual_stages: int, num_microbatches: int
) -> str | None:
    """Limits of torch's schedule classes, and of what interleaving is good for.

    Returns:
        The rule that is broken, with its numbers, None where the schedule runs.
    """
    if schedule == Schedule.ONE_F_ONE_B and num_microbatches < pp:
        return f"1F1B needs microbatches >= stages, but {num_microbatches} < {pp}"
    if schedule == Schedule.DUAL_PIPE_V and num_microbatches < 2 * pp:
        return (
            f"DualPipeV needs microbatches >= stages, two on each rank, but "
            f"{num_microbatches} < {2 * pp}"
        )
    if schedule in V_SCHEDULES and virtual_stages != 2:
        return f"{schedule} has two stages on each rank, not {virtual_stages}"
    if schedule in (Schedule.INTERLEAVED, Schedule.INTERLEAVED_ZERO_BUBBLE):
        if num_microbatches < pp:
            return (
                f"{schedule} needs microbatches >= pipeline ranks to interleave, but "
                f"{num_microbatches} < {pp}"
            )
        rounds = num_microbatches // pp
        if num_microbatches % rounds:
            return (
                f"{schedule} needs microbatches % rounds == 0, but "
                f"{num_microbatches} % {rounds} = {num_microbatches % rounds}"
            )
    return None


def divided_rule(
    schedule: str, *, recompute: str, reshard_after_forward: bool, whole: str
) -> str | None:
    """What a schedule that divides backwards does not go with, in torch 2.13.

    Args:
        schedule: The schedule.
        recompute: Recomputation of a block.
        reshard_after_forward: Whether parameters are gathered again in backward.
        whole: What is fixed of which both parts of a backward are one: "compile", "float8", or "".

    Returns:
        The rule that is broken, with what would work, None where nothing is.
    """
    if schedule not in ZERO_BUBBLE_SCHEDULES:
        return None
    if recompute != Recomputation.NONE:
        return (
            f"{schedule} with activation_checkpointing={recompute}: the two parts of a backward "
            "would each run the block again, the second one for every weight of it (full), or "
            "fail (selective); it can be none"
        )
    if reshard_after_forward:
        return (
            f"{schedule} with reshard_after_forward=true: the second part of a backward would not "
            "find the parameters of its forward; it can be false"
        )
    if whole:
        what = {"compile": "compiled code", "float8": "products in float8"}[whole]
        return f"{schedule} with {whole}=true: torch does not divide the backward of {what}"
    return None


def rank_of_stage(schedule: str, stage: int, pp: int) -> int:
    """Pipeline rank of a stage: stages go round the ranks, or along them and back."""
    turn, place = divmod(stage, pp)
    return pp - 1 - place if turn and schedule in V_SCHEDULES else place


def stages_of_rank(schedule: str, rank: int, *, pp: int, num_stages: int) -> tuple[int, ...]:
    """Stages of a pipeline rank, in model order."""
    if schedule in V_SCHEDULES:
        return (rank, 2 * pp - 1 - rank)
    return tuple(range(rank, num_stages, pp))


@cache
def actions_by_rank(
    schedule: str, *, pp: int, virtual_stages: int, num_microbatches: int
) -> tuple[Actions, ...]:
    """Order of forwards and backwards on every pipeline rank.

    1F1B (Narayanan et al. 2019, PipeDream-flush) runs min(m, stages left) forwards, then
    alternates; GPipe (Huang et al. 2019) all forwards, then all backwards; Interleaved1F1B
    (Narayanan et al. 2021) goes round the stages of a rank; for those that divide backwards see
    ``zero_bubble``. The same orders as torch's schedule classes make, which take seconds for
    hundreds of stages.

    Nobody waits for a gradient of the model's inputs, and torch's first stage runs nothing as the
    first part of a backward: all of it is where the schedule has the second.
    """
    if schedule in ZERO_BUBBLE_SCHEDULES:
        return tuple(
            _whole_on_first(_divided(schedule, rank, pp, virtual_stages, num_microbatches))
            for rank in range(pp)
        )
    if schedule == Schedule.INTERLEAVED:
        return tuple(_interleaved(rank, pp, virtual_stages, num_microbatches) for rank in range(pp))
    found: list[Actions] = []
    for rank in range(pp):
        warmup = (
            num_microbatches if schedule == Schedule.GPIPE else min(num_microbatches, pp - rank)
        )
        forward: tuple[int, Pass] = (rank, "F")
        backward: tuple[int, Pass] = (rank, "B")
        steady = (backward, forward) * (num_microbatches - warmup)
        found.append((forward,) * warmup + steady + (backward,) * warmup)
    return tuple(found)


def _divided(
    schedule: str, rank: int, pp: int, virtual_stages: int, num_microbatches: int
) -> Actions:
    """One rank under a schedule that divides backwards, as torch's class has it."""
    if schedule == Schedule.ZBV:
        return zbv(rank, pp, num_microbatches)
    if schedule == Schedule.DUAL_PIPE_V:
        return dual_pipe_v(rank, pp, num_microbatches)
    return interleaved_zero_bubble(rank, pp, virtual_stages, num_microbatches)


def _whole_on_first(row: Actions) -> Actions:
    whole: dict[str, Pass] = {"W": "B"}
    return tuple(
        (stage, what if stage else whole.get(what, what))
        for stage, what in row
        if stage or what != "I"
    )


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

    forwards: list[tuple[int, Pass]] = [(stage(step), "F") for step in range(total)]
    last = (virtual_stages - 1) * pp + 2 * rank
    backwards: list[tuple[int, Pass]] = [(last - stage(step), "B") for step in range(total)]
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
    return min(num_microbatches, 6 * microbatches_per_round(schedule, pp, num_microbatches))


def microbatches_per_round(schedule: str, pp: int, num_microbatches: int) -> int:
    """Microbatches after which a rank's list repeats itself, at the most."""
    if schedule in (Schedule.INTERLEAVED, Schedule.INTERLEAVED_ZERO_BUBBLE):
        return num_microbatches // max(1, num_microbatches // pp)
    return pp


def tried_schedules(
    pp: int, max_stages: int, asked: str | None, asked_stages: int | None
) -> Iterator[tuple[str, int]]:
    """Schedules and stages per rank to try.

    Args:
        pp: Pipeline ranks.
        max_stages: Most stages that the model can be cut into.
        asked: The schedule that is asked for, None for any that is planned unasked.
        asked_stages: The stages per rank that are asked for, None for any.
    """
    if pp == 1:
        yield Schedule.NONE, 1
        return
    for schedule in (Schedule.ONE_F_ONE_B, Schedule.GPIPE):
        if asked in (None, schedule) and asked_stages in (None, 1):
            yield schedule, 1
    if asked is not None and asked not in PLANNED_SCHEDULES:
        yield asked, 1
    for shared in SHARED_SCHEDULES:
        if shared != asked and (asked or shared not in UNASKED_SCHEDULES):
            continue
        most = max_stages // pp
        counts = (2,) if shared in V_SCHEDULES else virtual_stage_counts(most)
        for count in counts if asked_stages is None else (asked_stages,):
            if 1 < count <= most:
                yield shared, count


def virtual_stage_counts(most: int) -> tuple[int, ...]:
    """Stages per rank that the search tries for interleaved schedules: powers of two."""
    return tuple(2**power for power in range(1, most.bit_length()) if 2**power <= most)
