"""Step time of a pipeline under the schedule that a run used."""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.cost.replicated import StagePasses
from planner.cost.simulate import simulate_s
from planner.cost.zero_bubble import zero_bubble_s
from planner.strategy.schedules import actions_by_rank, in_flight

SPLIT_SCHEDULES = {"ZB-1p": 1, "ZB-2p": 2}
"""Zero-bubble schedules, and how many times 1F1B's microbatches a rank may hold."""

_SIMULATED_ROUNDS = 4
"""Microbatches per rank that are simulated; the rest repeats at the pace of the slowest rank.

With stages that differ by a factor of 4 this misses the simulation of all by less than 2%.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimes:
    """What all microbatches of a step take."""

    step_s: float
    """From the first forward to the last backward."""
    in_flight: tuple[tuple[int, ...], ...]
    """Microbatches that each rank holds of each of its stages at its fullest."""


def pipeline_times(
    schedule: str, passes: Sequence[StagePasses], *, pp: int, num_microbatches: int
) -> PipelineTimes:
    """Time all microbatches.

    Args:
        schedule: One of ``planner.validation.types.SCHEDULES``.
        passes: One microbatch, by stage.
        pp: Pipeline ranks.
        num_microbatches: Microbatches per step.
    """
    forward_s = [each.forward_pass_s for each in passes]
    backward_s = [each.backward_pass_s for each in passes]
    if pp == 1:
        step_s = num_microbatches * (sum(forward_s) + sum(backward_s))
        return PipelineTimes(step_s=step_s, in_flight=((1,),))
    if schedule in SPLIT_SCHEDULES:
        weight_s = [each.weight_backward_s for each in passes]
        split = zero_bubble_s(
            forward_s=forward_s,
            input_backward_s=[b - w for b, w in zip(backward_s, weight_s, strict=True)],
            weight_backward_s=weight_s,
            num_microbatches=num_microbatches,
            limit=SPLIT_SCHEDULES[schedule] * pp,
        )
        return PipelineTimes(
            step_s=split.step_s, in_flight=tuple((held,) for held in split.in_flight)
        )
    virtual_stages = len(passes) // pp
    simulated = _simulated_microbatches(pp, num_microbatches)
    step_s = simulate_s(
        actions_by_rank(schedule, pp=pp, virtual_stages=virtual_stages, num_microbatches=simulated),
        forward_s=forward_s,
        backward_s=backward_s,
        transfer_s=[0.0] * (len(passes) - 1),
    )
    pace_s = max(sum(forward_s[rank::pp]) + sum(backward_s[rank::pp]) for rank in range(pp))
    if schedule == "GPipe":
        # All forwards come first: each half has a slowest rank of its own.
        pace_s = max(forward_s) + max(backward_s)
    return PipelineTimes(
        step_s=step_s + (num_microbatches - simulated) * pace_s,
        in_flight=tuple(
            max(_held(schedule, pp, virtual_stages, num_microbatches, rank), key=sum)
            for rank in range(pp)
        ),
    )


def _simulated_microbatches(pp: int, num_microbatches: int) -> int:
    """Microbatches to simulate, of the same remainder by the pipeline's ranks."""
    most = _SIMULATED_ROUNDS * pp
    if num_microbatches <= most:
        return num_microbatches
    return most + (num_microbatches - most) % pp


def _held(
    schedule: str, pp: int, virtual_stages: int, num_microbatches: int, rank: int
) -> tuple[tuple[int, ...], ...]:
    return in_flight(
        schedule, pp=pp, virtual_stages=virtual_stages, num_microbatches=num_microbatches, rank=rank
    )
