"""Trees of tensors: what modules get and return."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

Tree: TypeAlias = Any
"""A tensor, or nested tuples, lists and dicts of tensors."""
Args: TypeAlias = tuple[Any, ...]
"""Positional arguments of a call."""
Kwargs: TypeAlias = dict[str, Any]
"""Keyword arguments of a call."""
Function: TypeAlias = Any
"""A function or ATen op, as torch hands it to a hook."""


def cast_floats(tree: Tree, dtype: torch.dtype) -> Tree:
    """Cast floating-point tensors of a tree, leave the others."""
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


def stream_of(args: Args, kwargs: Kwargs) -> Tensor:
    """Return the stream among a block's arguments: its first tensor."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value
    raise TypeError("a block was called without a tensor: it cannot be cut into stages here")


def with_stream(args: Args, kwargs: Kwargs, stream: Tensor) -> tuple[Args, Kwargs]:
    """Put the stream in the place of a block's first tensor argument."""
    old = stream_of(args, kwargs)
    new_args = tuple(stream if value is old else value for value in args)
    return new_args, {k: stream if v is old else v for k, v in kwargs.items()}


def tensors_of(tree: Tree) -> list[Tensor]:
    """Return the tensors of a tree."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def first_tensor(output: Tree) -> Tensor:
    """Return the stream in what the last block returns."""
    return output if isinstance(output, Tensor) else tensors_of(output)[0]


def with_tensors(tree: Tree, new: Mapping[int, Tensor]) -> Tree:
    """Put tensors in the place of some of a tree's tensors, by their position among these."""
    leaves, structure = tree_flatten(tree)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for index, tensor in new.items():
        leaves[places[index]] = tensor
    return tree_unflatten(leaves, structure)


class _Alias(torch.autograd.Function):
    """The same memory as a tensor of its own: no view, and no leaf that torch uses every step.

    FSDP2 leaves hooks on what modules return: on a leaf they would add up, and a change of a view
    in place would drop them.
    """

    @staticmethod
    def forward(_: object, tensor: Tensor) -> Tensor:
        return tensor.new_empty(0).set_(tensor)  # type: ignore[call-overload, no-any-return]

    @staticmethod
    def backward(_: object, grad: Tensor) -> Tensor:
        return grad


def alias_of(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor as a tensor of its own."""
    aliased: Tensor = _Alias.apply(tensor)  # type: ignore[no-untyped-call]
    return aliased


def without_view(tensor: Tensor) -> Tensor:
    """Return a tensor, or a tensor of its own where it is a view."""
    return alias_of(tensor) if type(tensor) is Tensor and tensor._is_view() else tensor
