"""Products of groups of rows in float64, for which torch has no kernel on CPUs."""

import functools
import warnings
from itertools import pairwise

import torch
from torch import Tensor


@functools.cache
def allow_float64_groups() -> torch.library.Library:
    """Let ``grouped_mm`` take float64 on CPUs; other dtypes keep torch's kernel."""
    kernel = torch.library.get_kernel("aten::_grouped_mm", "CPU")

    def multiply(
        keys: torch.DispatchKeySet,
        left: Tensor,
        right: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        is_plain = bias is None and out_dtype in (None, torch.float64)
        if left.dtype is right.dtype is torch.float64 and is_plain:
            return _product(left, right, [] if offs is None else offs.tolist())
        multiplied: Tensor = kernel.call_boxed(keys, left, right, offs, bias, out_dtype)
        return multiplied

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        library.impl(  # type: ignore[no-untyped-call]
            "_grouped_mm", multiply, "CPU", with_keyset=True, allow_override=True
        )
    return library  # whose kernel goes with it


def _product(left: Tensor, right: Tensor, ends: list[int]) -> Tensor:
    """Multiply group by group.

    Args:
        left: (groups, rows, inner), or (rows, inner).
        right: (groups, inner, columns), or (inner, columns).
        ends: Where groups end: in the rows of a left matrix of two dims, in the columns of a
            right one, or where both have two, in their inner dims; none where both have three.
            What lies behind the last is zero.

    Returns:
        (groups, rows, columns), or (rows, columns) where the groups have rows or columns.
    """
    spans = [slice(*span) for span in pairwise([0, *ends])]
    if left.dim() == right.dim() == 2:
        return torch.stack([left[:, span] @ right[span] for span in spans])
    if left.dim() == right.dim():
        return left @ right
    result = left.new_zeros(left.shape[-2], right.shape[-1])
    if left.dim() == 2:
        for span, own in zip(spans, right, strict=True):
            result[span] = left[span] @ own
    else:
        for span, own in zip(spans, left, strict=True):
            result[:, span] = own @ right[:, span]
    return result
