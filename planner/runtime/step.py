"""The microbatches of a step."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .data import split_microbatches
from .part import Part
from .processes import axis_names
from .trees import Tree


@dataclass(slots=True, kw_only=True)
class Runner:
    """Runs forward and backward of all microbatches of a step on what this rank trains."""

    parts: Sequence[Part]
    """The model, or this rank's stages in model order."""
    num_microbatches: int
    """Microbatches per step."""
    mesh: DeviceMesh
    """The whole mesh."""

    def run(self, inputs: Tree, targets: Tree) -> Tensor:
        """Accumulate the gradients of the mean loss of this rank's samples.

        Returns:
            Mean loss of the step over all data-parallel ranks, the same on every rank.
        """
        losses = self.losses(inputs, targets)
        loss = torch.zeros((), dtype=torch.float64, device=self.parts[0].device)
        if losses:
            loss += torch.stack([value.detach() for value in losses]).double().mean()
        dist.all_reduce(loss)
        pp_size = self.mesh["pp"].size() if "pp" in axis_names(self.mesh) else 1
        return loss / (self.mesh.size() // pp_size)

    def losses(self, inputs: Tree, targets: Tree) -> list[Tensor]:
        """Run the microbatches and return their losses, nothing on ranks without the last stage."""
        losses: list[Tensor] = []
        (part,) = self.parts
        for microbatch in split_microbatches((inputs, targets), self.num_microbatches):
            part.prepare_backward(is_last=len(losses) == self.num_microbatches - 1)
            loss = part(inputs=microbatch[0], targets=microbatch[1])
            torch.autograd.backward(loss / self.num_microbatches)
            losses.append(loss.detach())
        return losses
