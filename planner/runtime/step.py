"""The microbatches of a step."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .part import Part
from .trees import Microbatch


@dataclass(slots=True, kw_only=True)
class Runner:
    """Runs the microbatches of a step on what this rank trains."""

    parts: Sequence[Part]
    """The model, or this rank's stages in model order."""
    num_microbatches: int
    """Microbatches per step."""

    @property
    def evaluated_together(self) -> int:
        """How many microbatches ``evaluate`` takes."""
        return 1

    def train(self, microbatches: Iterable[Microbatch]) -> list[Tensor]:
        """Accumulate the gradients of their mean loss.

        Returns:
            The loss of each, nothing on ranks without the last stage.
        """
        losses: list[Tensor] = []
        (part,) = self.parts
        for inputs, targets in microbatches:
            part.prepare_backward(is_last=len(losses) == self.num_microbatches - 1)
            loss = part(inputs=inputs, targets=targets)
            torch.autograd.backward(loss / self.num_microbatches)
            losses.append(loss.detach())
        return losses

    def evaluate(self, microbatches: Iterable[Microbatch]) -> list[Tensor]:
        """Return the loss of each, without gradients; nothing on ranks without the last stage."""
        (part,) = self.parts
        return [part(inputs=inputs, targets=targets) for inputs, targets in microbatches]
