"""Ops that choose elements by data: what they give once it is known how many."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from planner.graph.torch_private import TorchResult

_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Choice:
    """A result whose first size depends on data."""

    most: int | None
    """Most elements that can be chosen, None where there is no limit."""
    make: Callable[[int], TorchResult]
    """Makes the result, without data, from the number of elements."""


def choice_of(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Choice | None:
    """Describe the result of an op that chooses elements, None for an op that is not known."""
    source: Tensor = args[0]

    def empty(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=_META)

    if name == "nonzero":
        return Choice(source.numel(), lambda count: empty(count, source.dim()))
    if name == "masked_select":
        most = torch.logical_and(source, args[1]).numel()
        return Choice(most, lambda count: empty(count, dtype=source.dtype))
    if name in ("_unique", "_unique2", "unique_consecutive", "unique_dim"):
        return _unique_choice(name, args, kwargs)
    if name == "repeat_interleave":
        size = kwargs.get("output_size")
        return Choice(None, lambda count: empty(count if size is None else size))
    if name == "bincount":
        weights = args[1] if len(args) > 1 else None
        dtype = torch.long
        if weights is not None:
            dtype = torch.float32 if weights.dtype is torch.float32 else torch.float64
        return Choice(None, lambda count: empty(count, dtype=dtype))
    return None


def _unique_choice(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Choice:
    source: Tensor = args[0]
    dim = args[1] if name == "unique_dim" else kwargs.get("dim")
    shape = [source.numel()] if dim is None else list(source.shape)
    inverse = source.shape if dim is None else (source.shape[dim],)

    def make(count: int) -> TorchResult:
        shape[dim or 0] = count
        parts = [
            torch.empty(shape, dtype=source.dtype, device=_META),
            torch.empty(inverse, dtype=torch.long, device=_META),
            torch.empty(count, dtype=torch.long, device=_META),
        ]
        return tuple(parts[:2] if name == "_unique" else parts)

    return Choice(shape[dim or 0], make)
