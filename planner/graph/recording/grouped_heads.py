"""Heads of grouped queries that attention repeats by itself, as an op of their own.

A kernel that takes no groups is given each head of keys and values as often as queries share it.
The script calls attention as the model does, with the heads that the model has: ranks of cp
exchange these. So the trace tells them apart from heads that a model repeats in front.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

_Context: TypeAlias = Any
"""Context of an autograd function."""

_HEADS = -3
"""Dim of the heads: (..., heads, tokens, head_dim)."""

_open_library: Callable[[str, str], Any] = torch.library.Library

_ops = _open_library("planner", "FRAGMENT")
_ops.define("_repeat_heads(Tensor input, int repeats) -> Tensor")
_ops.define("_repeat_heads_backward(Tensor grad_out, int repeats) -> Tensor")


def _repeat_heads_meta(source: Tensor, repeats: int) -> Tensor:
    *lead, heads, tokens, size = source.shape
    return source.new_empty([*lead, heads * repeats, tokens, size])


def _repeat_heads_backward_meta(grad: Tensor, repeats: int) -> Tensor:
    *lead, heads, tokens, size = grad.shape
    return grad.new_empty([*lead, heads // repeats, tokens, size])


_ops.impl("_repeat_heads", _repeat_heads_meta, "Meta")
_ops.impl("_repeat_heads_backward", _repeat_heads_backward_meta, "Meta")


class _RepeatHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, source: Tensor, repeats: int) -> Tensor:
        ctx.repeats = repeats
        result: Tensor = torch.ops.planner._repeat_heads(source, repeats)
        return result

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None]:
        return torch.ops.planner._repeat_heads_backward(grad, ctx.repeats), None


_apply: Callable[..., Tensor] = _RepeatHeads.apply


def repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    """Repeat the heads of keys or values until there are as many as of queries.

    Args:
        tensor: Keys or values.
        heads: Heads of the queries.
    """
    return _apply(tensor, heads // tensor.shape[_HEADS])
