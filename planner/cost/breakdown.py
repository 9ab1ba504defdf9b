"""What a step costs, in seconds and bytes, by component."""

from dataclasses import dataclass, fields
from operator import attrgetter


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBreakdown:
    """Peak memory of one rank (or of one stage as if alone on a rank), bytes."""

    params_bytes: int
    """Sharded parameters as the optimiser keeps them."""
    grads_bytes: int
    """Sharded gradients."""
    optimizer_bytes: int
    """Sharded optimiser states (two AdamW moments)."""
    activations_bytes: int
    """Tensors kept for backward, over all microbatches in flight at the peak."""
    buffers_bytes: int
    """Gathered parameters, unsharded gradients, receive buffers of stages, the model's own."""
    temporary_bytes: int
    """Highest transient on top: logits and loss, the block being recomputed."""
    reserve_bytes: int
    """Device context, communicator and library workspaces, allocator slack."""

    @property
    def tensor_bytes(self) -> int:
        """All that is no reserve."""
        return self.total_bytes - self.reserve_bytes

    @property
    def total_bytes(self) -> int:
        """Sum of all components."""
        return sum(_MEMORY_PARTS(self))


_MEMORY_PARTS = attrgetter(*(field.name for field in fields(MemoryBreakdown)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CostBreakdown:
    """Where the time of one optimiser step goes, seconds; the parts add up to the step.

    Seen from the pipeline rank that sets the pace.
    """

    compute_s: float
    """Forward and backward of all its microbatches, recomputation apart."""
    recompute_s: float
    """Activations computed again in backward."""
    tp_comm_s: float
    """Exposed tensor-parallel collectives."""
    pp_comm_s: float
    """Exposed transfers between stages."""
    dp_comm_s: float
    """Exposed traffic of parameters and gradients, between data-parallel ranks and those that share
    a tied weight, with FSDP's copies of what it moves."""
    bubble_s: float
    """Idle time of the pipeline schedule."""
    optimizer_s: float
    """Gradient norm, clipping, the optimiser's own pass over the parameters, and what the framework
    does once a step whatever the model (``step_us``)."""
    cp_comm_s: float = 0.0
    """Exposed context-parallel collectives."""
    ep_comm_s: float = 0.0
    """Exposed expert-parallel collectives."""

    @property
    def step_time_s(self) -> float:
        """One optimiser step."""
        return sum(float(getattr(self, field.name)) for field in fields(self))
