"""Trees of tensors: what modules get and return."""

from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

Tree: TypeAlias = Any
"""A tensor, or nested tuples, lists and dicts of tensors."""
Args: TypeAlias = tuple[Any, ...]
"""Positional arguments of a call."""
Kwargs: TypeAlias = dict[str, Any]
"""Keyword arguments of a call."""
Function: TypeAlias = Any
"""A function or ATen op, as torch hands it to a hook."""
Microbatch: TypeAlias = tuple[Tree, Tree]
"""Inputs and targets."""


def cast_floats(tree: Tree, dtype: torch.dtype) -> Tree:
    """Cast floating-point tensors of a tree, leave the others."""
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


def tensors_of(tree: Tree) -> list[Tensor]:
    """Return the tensors of a tree."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def alias_of(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor as a tensor of its own: no view, and no leaf.

    FSDP2 leaves hooks on what modules return: on a leaf that is used in every step they would add
    up, and a change of a view in place would drop them.
    """
    aliased: Tensor = torch.ops.aten._unsafe_view(tensor, tensor.shape)
    return aliased


def without_view(tensor: Tensor) -> Tensor:
    """Return a tensor, or a tensor of its own where it is a view."""
    return alias_of(tensor) if type(tensor) is Tensor and tensor._is_view() else tensor
