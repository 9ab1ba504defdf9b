"""Tensors that code makes without saying where: they lie on the host, the model's on a GPU."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from planner.graph import torch_private
from planner.graph.loading.source import UserLine, lines_of_stack

_MOVING = frozenset(
    {
        *("__getitem__", "__setitem__", "copy_", "cuda", "index_put", "index_put_", "type_as"),
        *("_pack_padded_sequence", "_pad_packed_sequence", "ctc_loss", "tensor_split"),
    }
)
"""Functions that take a tensor on the host beside one on a GPU."""

_OF_SHAPE = frozenset({"expand_as", "reshape_as", "view_as"})
"""Functions that read nothing but the shape of their second tensor."""


class StrayTensors:
    """Follows such tensors to where they would meet others."""

    def __init__(self) -> None:
        self._lines: dict[int, tuple[Tensor, UserLine]] = {}
        self._met: dict[UserLine, None] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What a GPU would refuse, one sentence for each line that makes one."""
        return tuple(
            f"{line.place} ({line.code}) makes a tensor on the CPU, which is then used with the"
            " model's own: on a GPU this raises; make it with device=x.device"
            for line in self._met
        )

    def made(self, tensor: object) -> None:
        """Note a tensor that is made where no device is named."""
        if not isinstance(tensor, Tensor) or not tensor.dim():
            return
        line = next(lines_of_stack(), None)
        if line is not None and torch.get_default_device().type == "cpu":
            self._lines[id(tensor)] = tensor, line

    def used(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: object,
    ) -> None:
        """Note what a function gets of them, and that what it makes of them alone is one too."""
        if not self._lines:
            return
        tensors = [
            leaf for leaf in torch_private.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        ]
        lines = [self._lines[id(tensor)][1] for tensor in tensors if id(tensor) in self._lines]
        if not lines:
            return
        if _moves(func, args, kwargs):
            self._lines.pop(id(result), None)  # nothing moves while all lie on the meta device
            return
        others = [tensor for tensor in tensors if tensor.dim() and id(tensor) not in self._lines]
        if others and getattr(func, "__name__", "") not in _OF_SHAPE:
            self._met.update(dict.fromkeys(lines))
            return
        for leaf in torch_private.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._lines[id(leaf)] = leaf, lines[0]


def _moves(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name != "to":
        return name in _MOVING
    places = (*args[1:], *kwargs.values())
    return any(isinstance(each, (str, torch.device, Tensor)) for each in places)
