"""A stage on a rank at one moment of the schedule, and what it holds then."""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.cost.breakdown import MemoryBreakdown
from planner.strategy.moments import StageMoment


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldStage:
    """A stage on a rank, at one moment of the schedule."""

    first: int
    """First unit."""
    end: int
    """One past the last unit."""
    kinds: tuple[str, ...]
    """Recomputation of each unit."""
    moment: StageMoment
    """What it holds of the step's microbatches."""


def left_bytes(outside_bytes: int, kept_bytes: int, num_blocks: int) -> int:
    """What a microbatch has left when the last of some blocks runs its backward.

    Args:
        outside_bytes: Activations of the unit before all blocks, where the stage has it, and
            gradients of those behind that last so long.
        kept_bytes: Those of the blocks.
        num_blocks: How many blocks there are.
    """
    return outside_bytes + (kept_bytes // num_blocks if num_blocks else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageState:
    """What a stage holds at one moment whatever its activations, bytes."""

    params: float
    grads: float
    optimizer: float
    buffers: float
    transient: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.params + self.grads + self.optimizer + self.buffers + self.transient


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingBytes:
    """What changes of a microbatch when the inputs' part of its backward is over."""

    gradients: int
    """What has come."""
    released: int
    """What goes when that part ends."""


NOTHING_WAITS = WaitingBytes(gradients=0, released=0)
"""Where no backward is divided."""


def moment_bytes(
    moment: StageMoment, *, kept: int, left: int, beside: int, waiting: WaitingBytes
) -> int:
    """Activations that a stage holds at a moment of the schedule.

    Args:
        moment: The moment.
        kept: What its units count of a microbatch, bytes.
        left: What of that is left at the end of a backward.
        beside: What else it keeps of a microbatch, less what lies in receive buffers.
        waiting: What is otherwise with a microbatch whose backward is divided.
    """
    held = moment.in_flight * (kept + beside) - moment.is_ending * (kept - left)
    if moment.waiting:
        held += moment.waiting * (kept + beside + waiting.gradients - waiting.released)
        held += moment.is_dividing * waiting.released
    # What is left is a block of the mean size, which may be less than what the first received.
    return max(0, held)


def moment_breakdown(
    states: Sequence[StageState],
    *,
    activations_bytes: int = 0,
    temporary_bytes: int = 0,
) -> MemoryBreakdown:
    """Tensors that the stages of a rank hold at a moment, their own transients beside others."""
    return MemoryBreakdown(
        params_bytes=round(sum(state.params for state in states)),
        grads_bytes=round(sum(state.grads for state in states)),
        optimizer_bytes=round(sum(state.optimizer for state in states)),
        activations_bytes=activations_bytes,
        buffers_bytes=round(sum(state.buffers for state in states)),
        temporary_bytes=temporary_bytes + round(sum(state.transient for state in states)),
        reserve_bytes=0,
    )
