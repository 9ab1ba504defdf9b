"""Pipeline schedules: their limits and their action lists.

Names are those of ``torch.distributed.pipelining.schedules.get_schedule_class``.
"""

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
