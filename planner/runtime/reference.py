"""The same training on one process: the plain model, with the same weights and batches."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .model import UserModel, cast_parameters
from .part import Part, Runner
from .trees import Tree


class _Whole(Part):
    """The plain model, whose parameters are cast to the compute dtype where it runs."""

    dtype = torch.float32

    def forward(self, *, inputs: Tree, targets: Tree) -> Tensor:
        """Run one microbatch and return its scalar loss."""
        cast = {name: p.to(self.dtype) for name, p in self.model.named_parameters()}
        keywords = inputs if isinstance(inputs, Mapping) else {}
        args = () if keywords else inputs if isinstance(inputs, tuple | list) else (inputs,)
        output = torch.func.functional_call(self.model, cast, tuple(args), dict(keywords))
        return self.user.loss(output, targets)


def reference_runner(
    model: nn.Module, user: UserModel, dtype: torch.dtype, num_microbatches: int, replicas: int
) -> Runner:
    """Run the microbatches of a step of all data-parallel ranks on the plain model."""
    part = _Whole(cast_parameters(model, dtype), user, blocks=())
    part.dtype = dtype
    part.move_to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return Runner(parts=[part], num_microbatches=num_microbatches * replicas, replicas=replicas)
