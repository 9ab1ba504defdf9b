"""Work per op: floating-point operations and bytes moved, from the shapes of its tensors."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from planner.vocabulary import WorkKind

FlopFormula = Callable[[Sequence[Any], Sequence[Tensor]], int]
"""FLOPs from the positional arguments and the output tensors."""

GATHER_OPS = frozenset({"embedding", "index", "gather", "index_select"})
"""Ops that read from their first input only what they write."""

ALLOCATION_OPS = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
)
"""Ops that move no bytes although they are no views."""

LEAST_SHARE = 0.02
"""Share of a model's FLOPs below which a kind of op does not make it another kind of model: the
convolution that cuts an image into patches has less than 1% of a ViT's."""

OVERWRITING_OPS = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_"})
"""In-place ops that do not read what they overwrite."""


def matmul_flop(left: Tensor, right: Tensor) -> int:
    """Count a (batched) matrix product (..., m, k) x (..., k, n): 2 m k n for each of the batch."""
    return 2 * left.numel() * right.shape[-1]


def attention_flop(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Count fused attention in full, causal or not: query x key and scores x value.

    Shapes are (batch, heads, sequence, head dim); keys may have fewer heads (grouped query).
    """
    batch, heads, length, head_dim = query.shape
    return 2 * batch * heads * length * key.shape[-2] * (head_dim + value.shape[-1])


def attention_backward_flop(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Count the backward of fused attention: five products, the scores being made again."""
    batch, heads, length, head_dim = query.shape
    return 2 * batch * heads * length * key.shape[-2] * (3 * head_dim + 2 * value.shape[-1])


def convolution_flop(source: Tensor, output: Tensor, weight: Tensor, *, transposed: bool) -> int:
    """Count a convolution with groups.

    The weight is (out channels, in channels / groups, ...), or for a transposed convolution
    (in channels, out channels / groups, ...), so that its trailing dims are the work per element.
    """
    moved = source.numel() if transposed else output.numel()
    return 2 * moved * math.prod(weight.shape[1:])


def _convolution(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    return convolution_flop(args[0], outputs[0], args[1], transposed=args[6])


def _convolution_backward(args: Sequence[Any], _: Sequence[Tensor]) -> int:
    # torch.utils.flop_counter counts the weight gradient of a grouped convolution as if it had
    # one group; each gradient asked for costs as much as the forward.
    grad, source, weight, transposed, mask = args[0], args[1], args[2], args[7], args[10]
    wanted = int(mask[0]) + int(mask[1])
    return wanted * convolution_flop(source, grad, weight, transposed=transposed)


def _grouped_matmul(args: Sequence[Any], _: Sequence[Tensor]) -> int:
    left: Tensor = args[0]
    right: Tensor = args[1]
    if left.dim() == 3 and right.dim() == 2:
        return 2 * right.numel() * left.shape[-2]
    return 2 * left.numel() * right.shape[-1]


def _rnn(args: Sequence[Any], _: Sequence[Tensor]) -> int:
    steps = args[0].shape[0] * args[0].shape[1]
    return sum(2 * steps * weight.numel() for weight in args[3] if weight.dim() == 2)


def _rnn_backward(args: Sequence[Any], _: Sequence[Tensor]) -> int:
    steps = args[3].shape[0] * args[3].shape[1]
    return sum(4 * steps * weight.numel() for weight in args[8] if weight.dim() == 2)


def _attention(args: Sequence[Any], _: Sequence[Tensor]) -> int:
    return attention_flop(args[0], args[1], args[2])


def _attention_backward(args: Sequence[Any], _: Sequence[Tensor]) -> int:
    return attention_backward_flop(args[1], args[2], args[3])


FLOP_FORMULAS: dict[str, FlopFormula] = {
    "mm": lambda args, _: matmul_flop(args[0], args[1]),
    "bmm": lambda args, _: matmul_flop(args[0], args[1]),
    "mv": lambda args, _: 2 * args[0].numel(),
    "dot": lambda args, _: 2 * args[0].numel(),
    "addmm": lambda args, _: matmul_flop(args[1], args[2]),
    "baddbmm": lambda args, _: matmul_flop(args[1], args[2]),
    "addbmm": lambda args, _: matmul_flop(args[1], args[2]),
    "addmv": lambda args, _: 2 * args[1].numel(),
    "_addmm_activation": lambda args, _: matmul_flop(args[1], args[2]),
    "_scaled_mm": lambda args, _: matmul_flop(args[0], args[1]),
    "_grouped_mm": _grouped_matmul,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_flash_attention_backward": _attention_backward,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_efficient_attention_backward": _attention_backward,
    "_scaled_dot_product_cudnn_attention": _attention,
    "_scaled_dot_product_cudnn_attention_backward": _attention_backward,
    "_fused_rnn": _rnn,
    "_fused_rnn_backward": _rnn_backward,
}
"""Formulas by op name. Every other op counts no FLOPs: it is bound by the bytes it moves.

2 FLOPs per multiply-add, as torch.utils.flop_counter counts.
"""

_KINDS = (
    ("_scaled_dot_product", WorkKind.ATTENTION),
    ("_grouped_mm", WorkKind.GROUPED),
    ("convolution", WorkKind.CONVOLUTION),
    ("_fused_rnn", WorkKind.RECURRENCE),
)
"""How names of ops begin whose FLOPs are not those of matrix products."""


def work_kind(name: str) -> WorkKind:
    """Tell the kind of an op that has FLOPs."""
    return next((kind for start, kind in _KINDS if name.startswith(start)), WorkKind.PRODUCTS)


def kinds_of_work(work: Iterable[tuple[str, int]]) -> tuple[WorkKind, ...]:
    """List the kinds of ops that do a model's FLOPs, those that do most of them first.

    Args:
        work: Name and FLOPs of each op.

    Returns:
        Kinds with at least ``LEAST_SHARE`` of the FLOPs.
    """
    by_kind: Counter[WorkKind] = Counter()
    for name, count in work:
        if count:
            by_kind[work_kind(name)] += count
    least = LEAST_SHARE * by_kind.total()
    return tuple(kind for kind, count in by_kind.most_common() if count >= least)


def flop(name: str, args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    """Count the floating-point operations of one op."""
    formula = FLOP_FORMULAS.get(name)
    return 0 if formula is None else formula(args, outputs)


def traffic_bytes(
    name: str, input_bytes: Sequence[int], output_bytes: Sequence[int], *, in_place: bool
) -> tuple[int, int]:
    """Count the bytes that one op reads from memory and writes to it, nothing fused.

    Args:
        name: Name of the op; views never come here.
        input_bytes: Bytes of each tensor read; expanded tensors count what is stored.
        output_bytes: Bytes of each tensor written.
        in_place: Whether the first input is what the op writes to.

    Returns:
        Bytes read, bytes written.
    """
    if name in ALLOCATION_OPS:
        return 0, 0
    written = sum(output_bytes)
    if name in GATHER_OPS:
        return written + sum(input_bytes[1:]), written
    if in_place and name in OVERWRITING_OPS:
        return sum(input_bytes[1:]), written
    return sum(input_bytes), written
