"""Divides the backward of a stage as torch's schedules do, before a script is written.

torch finds the part for the weights by where their paths meet those of what the stage receives
(``torch.distributed.pipelining._backward``, private: schedules call it). It leaves out weights
whose paths meet none, and fails where those of one weight are a part of others' paths.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from planner.errors import CodegenError
from planner.runtime.stages import Stage


def divide_backward(
    stage: Stage, outputs: Sequence[Tensor], received: Sequence[Tensor], schedule: str
) -> None:
    """Check that both parts of a stage's backward make the gradients of the whole.

    Args:
        stage: The stage, on the meta device; any but the first, whose backward is not divided.
        outputs: What its forward returned, or what stands for a loss of it.
        received: What it received, leaves that have gradients.
        schedule: Name of the schedule.

    Raises:
        CodegenError: They do not.
    """
    named = {name: each for name, each in stage.named_parameters() if each.requires_grad}
    weights = list(named.values())
    roots = [each for each in outputs if each.requires_grad]
    ones = [torch.ones_like(each) for each in roots]
    whole = torch.autograd.grad(roots, weights, ones, retain_graph=True, allow_unused=True)
    try:
        _, groups = stage_backward_input(roots, ones, list(received), iter(weights))
        stage_backward_weight(iter(weights), groups)
    except Exception as error:
        words = next(iter(str(error).strip().splitlines()), "")
        raise _refusal(stage, schedule, f"{type(error).__name__}: {words}") from error
    for (name, weight), gradient in zip(named.items(), whole, strict=True):
        if (weight.grad is None) != (gradient is None):
            raise _refusal(stage, schedule, f"it makes no gradient of {name}")
        weight.grad = None


def _refusal(stage: Stage, schedule: str, reason: str) -> CodegenError:
    return CodegenError(
        f"{schedule} divides backwards, and torch's part for the weights of stage {stage.index} is "
        f"not what this model needs: {reason}",
        hint="plan with --fix schedule=1F1B or Interleaved1F1B, whose backwards are whole",
    )
