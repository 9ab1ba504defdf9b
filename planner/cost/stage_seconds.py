"""What a stage takes of a step, part by part."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Seconds of a stage; all but the last two per microbatch."""

    compute_s: float
    """Forward and backward kernels."""
    recompute_s: float
    """What recomputation adds: its kernels and collectives, less the data-parallel traffic that
    hides behind them."""
    tp_comm_s: float
    """Exposed collectives over the split axis and those beside it."""
    context_comm_s: float
    """Those of them over cp around tp."""
    expert_comm_s: float
    """Those of them over ep."""
    dp_comm_s: float
    """Exposed parameter gathers (and gradient reductions) of every microbatch."""
    pp_comm_s: float
    """Transfers to and from the neighbouring stages."""
    forward_s: float
    """The forward pass, all in, with half of the transfers."""
    weight_backward_s: float
    """The part of the backward pass that only the parameters' gradients need."""
    step_comm_s: float
    """Exposed data-parallel traffic once per step."""
    optimizer_s: float
    """Gradient norm, clipping, AdamW."""

    @property
    def microbatch_s(self) -> float:
        """One microbatch, forward and backward."""
        return self.compute_s + self.recompute_s + self.tp_comm_s + self.dp_comm_s + self.pp_comm_s

    @property
    def backward_s(self) -> float:
        """The backward pass, all in, with half of the transfers."""
        return self.microbatch_s - self.forward_s

    @property
    def step_s(self) -> float:
        """All that comes once per step."""
        return self.step_comm_s + self.optimizer_s
