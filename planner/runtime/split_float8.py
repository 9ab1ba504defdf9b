"""Products in float8 of which each rank takes its part.

A part has a scale of its own. All scales are powers of two, so that those of the parts round what
they hold as that of the whole does, but for elements that are next to nothing beside the largest,
which keep more of their digits: no rank asks another for its largest element.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .float8 import ALIGNMENT, Float8Linear
from .float8 import multiply_in_float8 as multiply_on_rank
from .layout import Layout
from .split_decisions import layouts_on_parts
from .split_ops import outermost
from .split_tensor import Ranks, SplitTensor, is_over, unwrapped, wrapped
from .unread import SplitError, refuse_unread


def multiply_in_float8(model: nn.Module, blocks: Sequence[str], dtype: torch.dtype) -> None:
    """Let the linear layers of the blocks multiply in float8; arguments as on one rank."""
    multiply_on_rank(model, blocks, dtype, SplitFloat8Linear)


class SplitFloat8Linear(Float8Linear):
    """A linear layer with float8 products of parts."""

    def product(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Multiply the parts, which may be split in turn.

        Raises:
            SplitError: They lie so that each rank would need more than its parts, or have rows
                that no product in float8 takes.
        """
        operands = [rows, weight.t()]
        refuse_unread(operands)
        if not any(isinstance(each, SplitTensor) for each in operands):
            _check_aligned(weight)
            return super().product(rows, weight)
        ranks = outermost(operands)
        layout, parts = _layouts(operands, ranks)
        own = [_part(each, part, ranks) for each, part in zip(operands, parts, strict=True)]
        return wrapped(self.product(own[0], own[1].t()), layout, ranks)


def _layouts(operands: Sequence[Tensor], ranks: Ranks) -> tuple[Layout, tuple[Layout | None, ...]]:
    """Lay out a product as that of a linear layer runs without float8."""
    product = torch.ops.aten.mm.default
    call, found, parts = layouts_on_parts(product, operands, tuple(operands), {}, ranks)
    if found is None:
        raise SplitError(f"in float8, {call}: no rule says how it runs on the parts")
    return found[0], parts


def _part(tensor: Tensor, wanted: Layout | None, ranks: Ranks) -> Tensor:
    """What this rank holds of an operand, or takes of a whole one."""
    if is_over(tensor, ranks):
        return unwrapped(tensor)
    return tensor if wanted is None else ranks.part(tensor, wanted)


def _check_aligned(weight: Tensor) -> None:
    """Check that a rank's part of a weight has sizes that products take.

    Raises:
        SplitError: It has others.
    """
    if any(size % ALIGNMENT for size in weight.shape):
        raise SplitError(
            f"a rank's part of a weight is {tuple(weight.shape)}, and products in float8 take "
            f"multiples of {ALIGNMENT}"
        )
