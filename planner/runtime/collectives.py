"""What ranks of an axis do together with their parts of a tensor.

Each leaves its operand as it is and returns a tensor of its own. Without a group, in a dry run,
nothing but shapes is known.
"""

import torch
import torch.distributed as dist
from torch import Tensor


class Collectives:
    """Collectives that run where they are called."""

    def all_reduce(
        self, tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
    ) -> Tensor:
        """Return the sum over ranks, or what else ``op`` says."""
        result = tensor.clone(memory_format=torch.contiguous_format)
        if group is not None:
            dist.all_reduce(result, op=op, group=group)
        return result

    def all_gather(self, part: Tensor, size: int, group: dist.ProcessGroup | None) -> Tensor:
        """Return the parts of all ``size`` ranks, one behind the other along a first dim."""
        parts = part.new_empty((size, *part.shape))
        if group is not None:
            dist.all_gather_single(parts.view(-1), part.contiguous().view(-1), group=group)
        return parts

    def reduce_scatter(self, pieces: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """Return the sum over ranks of this rank's piece along the first dim."""
        part = torch.empty_like(pieces[0])
        if group is not None:
            dist.reduce_scatter_single(part.view(-1), pieces.view(-1), group=group)
        return part

    def all_to_all(self, pieces: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """Give each rank its piece along the first dim; return what this one gets of each."""
        received = torch.empty_like(pieces)
        if group is not None:
            dist.all_to_all_single(received.view(-1), pieces.view(-1), group=group)
        return received
