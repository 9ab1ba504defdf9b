"""Linear layers of blocks that multiply in float8.

Parameters, activations and gradients stay in the compute dtype; each product rounds its two
operands to float8, all of a tensor by one power of two that its largest element sets as the product
runs (Micikevicius et al. 2022, 2209.05433: e4m3 for values, e5m2 for gradients). Backward rounds
again what it multiplies: what it keeps is what layers beside it keep.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import ScalingType, pad, scaled_mm

from .trees import Tree

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
"""Dtypes of what is multiplied."""
ALIGNMENT = 16
"""What a product in float8 adds up is a multiple of it, and so is each row of its result."""

_LARGEST_EXPONENT = {VALUES: 8, GRADIENTS: 15}

_MOST_EXPONENT = 120
"""Of a scale, which has to be finite where all elements are next to nothing."""

Rounded: TypeAlias = tuple[Tensor, Tensor]
"""A tensor in float8, and what it is multiplied by to be as large as it was."""


def multiplies_in_float8(module: nn.Module) -> bool:
    """Whether a module of a block is a linear layer whose products are taken in float8."""
    return type(module) is nn.Linear and not (
        module.in_features % ALIGNMENT or module.out_features % ALIGNMENT
    )


def multiply_in_float8(
    model: nn.Module,
    blocks: Sequence[str],
    dtype: torch.dtype,
    layer: "type[Float8Linear] | None" = None,
) -> None:
    """Let the linear layers of the blocks multiply in float8.

    Args:
        model: The model.
        blocks: Paths of its blocks.
        dtype: Compute dtype. Beside float32 or float64, which are asked for to compare runs,
            products stay in it.
        layer: What linear layers become, ``Float8Linear`` where none is given.
    """
    if dtype != torch.bfloat16:
        return
    for path in blocks:
        for module in model.get_submodule(path).modules():
            if multiplies_in_float8(module):
                module.__class__ = layer or Float8Linear


class Float8Linear(nn.Linear):
    """A linear layer with float8 products, forward and backward."""

    def forward(self, input: Tensor) -> Tensor:
        """Return what the layer makes of (..., in_features); of nothing, there is no scale."""
        if not input.numel():
            return super().forward(input)
        rows = input.reshape(-1, self.in_features)
        result = self.product(rows, self.weight)
        if self.bias is not None:
            result = result + self.bias
        return result.view(*input.shape[:-1], self.out_features)

    def product(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Return (m, in_features) times the transposed (out_features, in_features)."""
        made: Tensor = _Product.apply(rows, weight)  # type: ignore[no-untyped-call]
        return made


class _Product(torch.autograd.Function):
    """(m, k) times the transposed (n, k)."""

    @staticmethod
    def forward(ctx: Tree, rows: Tensor, weight: Tensor) -> Tensor:
        by_rows, by_weight = _scale(rows, VALUES), _scale(weight, VALUES)
        ctx.save_for_backward(rows, weight, by_rows, by_weight)
        first, second = _rounded(rows, by_rows, VALUES), _rounded(weight, by_weight, VALUES)
        return _product(first, (second[0].t(), second[1]), rows.dtype, fast=True)

    @staticmethod
    def backward(ctx: Tree, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows, weight, by_rows, by_weight = ctx.saved_tensors
        of_rows = of_weight = None
        sent = _rounded(grad, _scale(grad, GRADIENTS), GRADIENTS)
        if ctx.needs_input_grad[0]:
            of_rows = _product(sent, _by_columns(weight, by_weight), grad.dtype)
        if ctx.needs_input_grad[1]:
            turned = _turned(sent[0]), sent[1]
            of_weight = _product(turned, _by_columns(rows, by_rows), grad.dtype)
        return of_rows, of_weight


def _scale(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the power of two by which all of a tensor is in the dtype's range."""
    largest = torch.linalg.vector_norm(tensor, float("inf"), dtype=torch.float32)
    exponent = _LARGEST_EXPONENT[dtype] - torch.frexp(largest).exponent
    return torch.exp2(exponent.clamp(max=_MOST_EXPONENT))


def _rounded(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Rounded:
    return (tensor * scale).to(dtype), scale.reciprocal()


def _by_columns(tensor: Tensor, scale: Tensor) -> Rounded:
    """Return a tensor in float8 as products take their second operand: column after column."""
    rounded, back = _rounded(tensor, scale, VALUES)
    return _turned(rounded).t(), back


def _turned(rounded: Tensor) -> Tensor:
    """Return a tensor with its dims swapped, and zeros where products want more to add up."""
    turned = rounded.t().contiguous()
    missing = -turned.shape[1] % ALIGNMENT
    return pad(turned, (0, missing)) if missing else turned


def _product(first: Rounded, second: Rounded, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    whole = ScalingType.TensorWise
    return scaled_mm(
        first[0], second[0], first[1], whole, second[1], whole,
        output_dtype=dtype, use_fast_accum=fast,
    )  # fmt: skip
