"""Collectives as ops of torch, which a graph of ops can hold.

Groups go by their names: an op takes no other word for them.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import Collectives

_NOW = Collectives()
_GROUPS: dict[str, dist.ProcessGroup | None] = {"": None}
_NAMES = __name__.replace(".", "_")
"""Of the ops: a copy of this module has ops of its own."""


@torch.library.custom_op(f"{_NAMES}::all_reduce", mutates_args=())
def _all_reduce(tensor: Tensor, op: str, group: str) -> Tensor:
    return _NOW.all_reduce(tensor, getattr(dist.ReduceOp, op), _GROUPS[group])


@_all_reduce.register_fake
def _(tensor: Tensor, op: str, group: str) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


@torch.library.custom_op(f"{_NAMES}::all_gather", mutates_args=())
def _all_gather(part: Tensor, size: int, group: str) -> Tensor:
    return _NOW.all_gather(part, size, _GROUPS[group])


@_all_gather.register_fake
def _(part: Tensor, size: int, group: str) -> Tensor:
    return part.new_empty((size, *part.shape))


@torch.library.custom_op(f"{_NAMES}::reduce_scatter", mutates_args=())
def _reduce_scatter(pieces: Tensor, group: str) -> Tensor:
    return _NOW.reduce_scatter(pieces, _GROUPS[group])


@_reduce_scatter.register_fake
def _(pieces: Tensor, group: str) -> Tensor:
    return torch.empty_like(pieces[0])


@torch.library.custom_op(f"{_NAMES}::all_to_all", mutates_args=())
def _all_to_all(pieces: Tensor, group: str) -> Tensor:
    return _NOW.all_to_all(pieces, _GROUPS[group])


@_all_to_all.register_fake
def _(pieces: Tensor, group: str) -> Tensor:
    return torch.empty_like(pieces)


def _name_of(group: dist.ProcessGroup | None) -> str:
    name = "" if group is None else group.group_name
    _GROUPS[name] = group
    return name


class TracedCollectives(Collectives):
    """The same, each an op."""

    def all_reduce(
        self, tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
    ) -> Tensor:
        """Return the sum over ranks, or what else ``op`` says."""
        result: Tensor = _all_reduce(tensor, op.name, _name_of(group))
        return result

    def all_gather(self, part: Tensor, size: int, group: dist.ProcessGroup | None) -> Tensor:
        """Return the parts of all ``size`` ranks, one behind the other along a first dim."""
        result: Tensor = _all_gather(part, size, _name_of(group))
        return result

    def reduce_scatter(self, pieces: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """Return the sum over ranks of this rank's piece along the first dim."""
        result: Tensor = _reduce_scatter(pieces, _name_of(group))
        return result

    def all_to_all(self, pieces: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """Give each rank its piece along the first dim; return what this one gets of each."""
        result: Tensor = _all_to_all(pieces, _name_of(group))
        return result
