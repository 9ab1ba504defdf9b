"""Results of ops that cannot run on the parts of split tensors: refused when they are read.

Most often nobody does. Attention averages its weights over heads, say, for callers that take its
output alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .trees import Args, Function, Kwargs, Tree, tensors_of


class SplitError(RuntimeError):
    """An op cannot run on split tensors."""


class UnreadTensor(Tensor):
    """What an op would have left that cannot run on the parts."""

    refusal: str

    @staticmethod
    def __new__(
        cls: type["UnreadTensor"], like: Tensor, device: torch.device, refusal: str
    ) -> "UnreadTensor":
        """Stand for a tensor that looks like one on the meta device."""
        made: UnreadTensor = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        made.refusal = refusal
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"UnreadTensor({tuple(self.shape)}, {self.refusal!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        refuse_unread(tensors_of((args, kwargs)))


def refuse_unread(tensors: Sequence[Tensor | None]) -> None:
    """Check that what is read has been made.

    Raises:
        SplitError: One of the tensors stands for what an op could not leave.
    """
    for each in tensors:
        if isinstance(each, UnreadTensor):
            raise SplitError(each.refusal)
