"""How kernels that go element by element run through their operands.

A GPU's kernel reads and writes several elements at once where all operands have one dtype and lie
alike in memory (TensorIterator in torch: coalesced to one dim, no cast). Else it works out where
each element lies, or casts it, which takes longer than its bytes do.
"""

from collections.abc import Iterable, Sequence

import torch

from planner.graph.recording.raw_op import RawOp
from planner.graph.recording.value_table import ViewKey
from planner.vocabulary import Operands

_COPIES = frozenset(
    {
        *("clone", "copy_", "copy", "_to_copy", "cat", "stack", "repeat"),
        *("slice_backward", "select_backward", "constant_pad_nd"),
    }
)
"""Ops that go element by element and that torch does not call pointwise."""

_PLACED = frozenset({"cat", "stack", "repeat", "slice_backward", "select_backward"})
"""Those that put each operand in its place in a larger one."""

_NARROW = (torch.bfloat16, torch.float16)


def operands_of(op: RawOp, keys: Sequence[ViewKey]) -> Operands:
    """Say how the kernel of an op runs through its operands.

    Args:
        op: The op.
        keys: Storage, offset, sizes, strides and dtype by value.
    """
    if op.is_view or not (op.is_pointwise or op.name in _COPIES) or not op.outputs:
        return "even"
    made = [keys[value] for value in op.outputs]
    # One element is a number that the kernel is handed.
    read = [key for value in op.inputs if (key := keys[value])[2].numel() > 1]
    is_even = op.name not in _PLACED and _lie_alike([*read, *made])
    floats = {key[4] for key in (*read, *made) if key[4].is_floating_point}
    if len(floats) > 1 and not (is_even and _narrows(read, made)):
        return "cast"
    return "even" if is_even else "strided"


def _lie_alike(keys: Sequence[ViewKey]) -> bool:
    """Whether tensors have the same elements in the same order, one behind the other."""
    forms = {(tuple(key[2]), _order(key[2], key[3])) for key in keys}
    return len(forms) == 1 and forms.pop()[1] is not None


def _order(sizes: Iterable[int], strides: Iterable[int]) -> tuple[int, ...] | None:
    """Dims from the innermost outwards, but for those of one element; None where gaps are."""
    dims = sorted(
        (stride, dim, size)
        for dim, (size, stride) in enumerate(zip(sizes, strides, strict=True))
        if size > 1
    )
    dense = 1
    for stride, _, size in dims:
        if stride != dense:
            return None
        dense *= size
    return tuple(dim for _, dim, _ in dims)


def _narrows(read: Sequence[ViewKey], made: Sequence[ViewKey]) -> bool:
    """Whether it is a copy of float32 in 16 bits, for which torch has a kernel of its own."""
    return len(read) == len(made) == 1 and read[0][4] is torch.float32 and made[0][4] in _NARROW
