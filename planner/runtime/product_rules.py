"""What matrix products and gradients do to layouts, and ops on sums over ranks.

These may leave a sum over ranks, which the planner does not: there a module changes it into
another layout before anything reads it.
"""

from collections.abc import Callable, Sequence

from .layout import PARTIAL, REPLICATE, Layout, shard
from .op_call import Call, Found, Operand, Shape
from .op_rules import MATMULS, _pointwise, _reduction, _repeated, _same, picked, rule_of

PRODUCTS = MATMULS | {"_grouped_mm"}
"""Products that may leave a sum over ranks: of matrices, and of groups of rows (the tokens of each
expert) with a matrix each."""

_ALIGNED = 8
"""Elements of two bytes in 16 bytes."""

Wanted = tuple[Found, Sequence[Layout | None]]
"""Layouts of the outputs, and for whole operands the layout of which each rank takes its part."""


def product_layouts(call: Call, tp: int) -> Wanted:
    """Lay out a product: ``mm``, ``bmm``, and ``addmm``, ``baddbmm`` with a summand before it."""
    if call.op.name == "_grouped_mm":
        found, both = _grouped_product(*call.operands[:2])
        if not all(_is_aligned(each, tp) for each in call.operands[:2]):
            found = None
        return ([found] if found else None), (*both, *[None] * len(call.operands[2:]))
    has_summand = call.op.name in ("addmm", "baddbmm", "addbmm")
    first, second = call.operands[-2:]
    found, parts = _product(first, second)
    if found is None or not has_summand:
        return ([found] if found else None), parts
    fits, wanted = _beside_result(call.operands[0], found, len(call.targets[0]))
    return ([found] if fits else None), (wanted, *parts)


def _product(first: Operand, second: Operand) -> tuple[Layout | None, tuple[Layout | None, ...]]:
    """Lay out a product of (..., m, k) and (..., k, n), with the parts of whole operands."""
    ndim = len(first.shape)
    rows, inner, columns = ndim - 2, ndim - 1, ndim - 1
    a, b = first.split, second.split
    if (a and a.dim < rows) or (b and b.dim < rows):  # one product per batch
        split = a or b
        alike = all(each is None or each == split for each in (a, b))
        return (split, (split, split)) if alike else (None, (None, None))
    if a and a.dim == rows:
        return (None if b else a), (None, None)
    if b and b.dim == columns:
        return (None if a else b), (None, None)
    # The inner dim of one or both is split: each rank has a sum over its part.
    split = a or shard(inner, b.outer if b else 1)
    other = shard(rows, split.outer)
    if (a and a != split) or (b and b != other):
        return None, (None, None)
    return PARTIAL, (split, other)


def _is_aligned(operand: Operand, tp: int) -> bool:
    """Say whether the kernel of grouped products takes a part: rows of 16 bytes in any dtype."""
    return operand.split is None or operand.shape[operand.split.dim] // tp % _ALIGNED == 0


def grouped_shape(shapes: Sequence[Shape]) -> Shape:
    """Return the shape of grouped products of two operands, with where each group ends third."""
    first, second = shapes[:2]
    if len(first) == len(second) == 2:
        return (*shapes[2], first[0], second[1])
    groups = first[:1] if len(first) == len(second) == 3 else ()
    return (*groups, first[-2], second[-1])


def _grouped_product(
    first: Operand, second: Operand
) -> tuple[Layout | None, tuple[Layout | None, Layout | None]]:
    """Lay out rows (t, k) by groups times (groups, k, n), or its gradient (k, t) times (t, n)."""
    none, a, b = (None, None), first.split, second.split
    if len(first.shape) != 2:
        return None, none
    if len(second.shape) == 2:  # one product per group over its part of t, which is not split
        if a and a.dim == 0 and not b:
            return shard(1, a.outer), none
        return (shard(2, b.outer), none) if b and b.dim == 1 and not a else (None, none)
    if b and b.dim == 2:
        return (None if a else shard(1, b.outer)), none
    split = a or shard(1, b.outer if b else 1)
    if split.dim != 1 or (b and b != split):
        return None, none
    return PARTIAL, (split, split)


def _beside_result(summand: Operand, found: Layout, ndim: int) -> tuple[bool, Layout | None]:
    """Say whether a summand can be added to a result, and which part of it a rank takes."""
    dim = found.dim - (ndim - len(summand.shape))
    if not found.is_shard or dim < 0 or summand.shape[dim] == 1:
        return summand.split is None, None
    wanted = shard(dim, found.outer)
    return summand.split in (None, wanted), None if summand.split else wanted


def _sum(call: Call, tp: int) -> Found:
    """Add along dims: a sum over ranks where one of them is split."""
    found = _reduction(call, tp)
    split = call.first.split
    return [PARTIAL] * len(call.targets) if found is None and split else found


def _norm_backward(call: Call, tp: int) -> Found:
    """The input's gradient lies as the input; those of weight and bias are sums over ranks.

    The last argument says which of them are asked for, where the op can leave some out.
    """
    split, sizes, asked = call.first.split, call.argument(2, ()), call.op.arguments[-1]
    if split is None or not isinstance(sizes, tuple):
        return None
    if split.dim >= len(call.first.shape) - len(sizes):
        return None
    first = [] if isinstance(asked, tuple) and not asked[0] else [split]
    return [*first, *[PARTIAL] * (len(call.targets) - len(first))]


def _softmax_backward(call: Call, tp: int) -> Found:
    split = call.first.split
    dim = call.dim(2, -1, len(call.first.shape))
    return None if split is None or split.dim == dim else [split]


def _looked_up(call: Call, tp: int) -> Found:
    """Rows of a whole table for a part of the indices."""
    table, indices = call.operands[:2]
    return None if table.split or indices.split is None else [indices.split]


def _embedding_backward(call: Call, tp: int) -> Found:
    """Gradient of a table: its columns split, or the tokens."""
    split = call.first.split
    if split is None:
        return None
    return [shard(1, split.outer) if split.dim == len(call.first.shape) - 1 else PARTIAL]


def _taken_backward(call: Call, tp: int) -> Found:
    """Zeros around a slice: the split dim is another."""
    split, shape = call.first.split, call.targets[0]
    if split is None:
        return None
    if call.op.name == "select_backward":
        dim = call.dim(2, 0, len(shape))
        moved = split.dim + (dim <= split.dim)
        return None if moved == dim else [shard(moved, split.outer)]
    dim, piece = call.dim(2, 0, len(shape)), call.first.shape[call.dim(2, 0, len(shape))]
    if split.dim != dim or shape[dim] == piece:
        return [split]
    start = call.argument(3, 0)
    is_segment = split.outer == 1 and shape[dim] % piece == 0 and isinstance(start, int)
    if not is_segment or call.argument(5, 1) != 1 or int(str(start)) % piece:
        return None
    return [shard(dim, shape[dim] // piece)]


def _cat_backward(call: Call, tp: int) -> Found:
    """Pieces of equal segments side by side along the dim in which each is split, or beside it."""
    dim = call.dim(1, 0, len(call.targets[0]))
    splits = [each.split for each in call.operands]
    if None in splits:
        splits = _beside_zeros(call, splits)
    if any(split is None or split.dim != dim for split in splits):
        return rule_of(call.op)(call, tp)  # type: ignore[misc]
    outers = [split.outer for split in splits if split is not None]
    sizes = [each.shape[dim] / outer for each, outer in zip(call.operands, outers, strict=True)]
    return [shard(dim, sum(outers))] if len(set(sizes)) == 1 else None


def _beside_zeros(call: Call, splits: Sequence[Layout | None]) -> list[Layout | None]:
    """Let constants lie as pieces that are alike: zeros for one that gets no gradient, say."""
    found = {split for split in splits if split is not None}
    alike = len(found) == 1 and len({each.shape for each in call.operands}) == 1
    if not alike or any(each.layout is not None and not each.split for each in call.operands):
        return list(splits)
    return [*found] * len(splits)


def _attention_backward(call: Call, tp: int) -> Found:
    """Gradients of query, key and value (and bias) lie as these do."""
    split = call.first.split
    if split is None or split.dim not in (0, 1):
        return None
    return [split if len(target) == 4 else REPLICATE for target in call.targets]


def _pad(call: Call, tp: int) -> Found:
    """Pad the last dims: others may be split."""
    split, pads = call.first.split, call.argument(1, ())
    if split is None or not isinstance(pads, tuple):
        return None
    return None if split.dim >= len(call.first.shape) - len(pads) // 2 else [split]


def _placed(call: Call, tp: int) -> Found:
    """Put elements in their places of what each rank takes its part of, where it is whole."""
    return picked(call, tp, first=0 if call.first.split else 1)


def _along(call: Call, tp: int) -> Found:
    """Ops that run along a dim: others may be split."""
    split = call.first.split
    dim = call.dim(1, -1, len(call.first.shape))
    return None if split is None or split.dim == dim else [split] * len(call.targets)


GRADIENT_RULES: dict[str, Callable[[Call, int], Found]] = {
    "clone": _same,
    "sum": _sum,
    "native_layer_norm_backward": _norm_backward,
    "_fused_rms_norm_backward": _norm_backward,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _softmax_backward,
    "embedding": _looked_up,
    "embedding_dense_backward": _embedding_backward,
    "slice_backward": _taken_backward,
    "select_backward": _taken_backward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_scaled_dot_product_flash_attention_backward": _attention_backward,
    "_scaled_dot_product_efficient_attention_backward": _attention_backward,
    "_scaled_dot_product_cudnn_attention_backward": _attention_backward,
    "_repeat_heads_backward": _repeated,
    "cat": _cat_backward,
    "constant_pad_nd": _pad,
    "cumsum": _along,
    "scatter": _placed,
    "scatter_add": _placed,
    # Elementwise by definition, though torch does not tag them.
    **dict.fromkeys(
        (
            *("elu_backward", "hardshrink_backward", "hardsigmoid_backward", "hardswish_backward"),
            *("hardtanh_backward", "leaky_relu_backward", "log_sigmoid_backward"),
            *("mish_backward", "softplus_backward", "softshrink_backward"),
        ),
        _pointwise,
    ),
}
"""Ops that the script runs besides those whose layouts the planner follows: of backward, most of
them."""

LINEAR_OPS = frozenset(
    {
        *("view", "_unsafe_view", "t", "transpose", "permute", "unsqueeze", "squeeze", "expand"),
        *("slice", "select", "split", "split_with_sizes", "unbind", "clone", "_to_copy", "detach"),
        *("alias", "neg", "sum", "mean", "slice_backward", "select_backward", "zeros_like"),
        *("cat", "stack", "constant_pad_nd", "embedding_dense_backward"),
    }
)
"""Ops of one tensor (or of several alike) that may run on the summands of a sum over ranks."""

SCALED_OPS = frozenset({"mul", "div", "add", "sub", "add_", "copy_"})
"""Ops of two tensors that may: a sum times what is whole, and sums of sums or with what is whole,
which one rank adds."""


def sum_layouts(call: Call) -> Found:
    """Lay out an op some of whose operands are sums over ranks."""
    name, layouts = call.op.name, [each.layout for each in call.operands]
    if any(layout is not None and layout.is_shard for layout in layouts):
        return None
    all_sums = all(layout == PARTIAL for layout in layouts)
    if name == "index":
        return [PARTIAL] if layouts.count(PARTIAL) == 1 and layouts[0] == PARTIAL else None
    if name == "index_put":  # the first rank keeps what is whole
        return [PARTIAL] if layouts[-1] == PARTIAL else None
    if name in LINEAR_OPS:
        return [PARTIAL] * len(call.targets) if all_sums else None
    if name not in SCALED_OPS:
        return None
    if name in ("mul", "div"):
        is_scaled = layouts[0] == PARTIAL or name == "mul"
        return [PARTIAL] if is_scaled and layouts.count(PARTIAL) == 1 else None
    return [PARTIAL] if layouts[0] == PARTIAL else None
