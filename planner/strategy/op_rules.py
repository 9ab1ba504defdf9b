"""What each op does to the layout of its operands: the legal placements per op.

Given the layouts of an op's inputs, ``output_layouts`` says which layouts its outputs have, or
that the op cannot run so without communication. Inputs that are constants of the step (rotary
tables, masks, index ranges) have layout None: a DTensor region slices them as needed.
"""

from collections.abc import Callable, Sequence

from planner.graph.operator_graph import OperatorGraph, OpNode
from planner.strategy.layout import REPLICATE, Layout, can_shard, shard
from planner.strategy.layout import through_reshape as reshape_layout
from planner.strategy.layout import through_segments as segment_layout

MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
"""Matrix products."""
ATTENTIONS = frozenset(
    {
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    }
)
"""Fused attention forward kernels: inputs (batch, heads, tokens, head_dim)."""

Shape = tuple[int, ...]
Operand = tuple[Shape, Layout | None]

_RESHAPES = frozenset(
    {"view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "flatten"}
)
_IDENTITIES = frozenset({"alias", "detach", "clone", "contiguous", "_to_copy", "lift_fresh"})
_REDUCE_LAST = frozenset(
    {"native_layer_norm", "_softmax", "_log_softmax", "rms_norm", "_fused_rms_norm"}
)
_NOT_POINTWISE = frozenset(
    {
        "embedding", "convolution", "gather", "index", "scatter", "sort", "topk", "cumsum",
        "nll_loss_forward", "index_select", "max_pool2d_with_indices", "_grouped_mm", "nonzero",
        "upsample_nearest2d", "_adaptive_avg_pool2d", "native_group_norm", "native_batch_norm",
        "cudnn_batch_norm", "rnn", "einsum", "roll", "flip", "constant_pad_nd",
    }
)  # fmt: skip


def output_layouts(
    graph: OperatorGraph, op: OpNode, layouts: Sequence[Layout | None], tp: int
) -> tuple[Layout | None, ...] | None:
    """Propagate layouts through one op that owns no parameters.

    Args:
        graph: The graph of the op.
        op: The op.
        layouts: One per input; None for a constant.
        tp: Ranks of the axis.

    Returns:
        One layout per output (None where the output is a constant), or None where the op
        cannot run on these layouts.
    """
    operands = [
        (graph.values[value].shape, layout)
        for value, layout in zip(op.inputs, layouts, strict=True)
    ]
    targets = [graph.values[value].shape for value in op.outputs]
    if all(layout is None for _, layout in operands):
        return (None,) * len(targets)
    if not any(layout is not None and layout.is_shard for _, layout in operands):
        return (REPLICATE,) * len(targets)
    rule = _rule(op)
    found = rule(op, operands, targets, tp)
    if found is None:
        return None
    if not all(
        layout is None or can_shard(shape, layout, tp)
        for shape, layout in zip(targets, found, strict=True)
    ):
        return None
    return tuple(found)


Rule = Callable[[OpNode, list[Operand], list[Shape], int], list[Layout | None] | None]


def _rule(op: OpNode) -> Rule:
    """Pick the rule of an op by its name."""
    named = _RULES.get(op.name)
    if named is not None:
        return named
    if op.name in _RESHAPES:
        return _reshape
    if op.name in _IDENTITIES:
        return _identity
    if op.name in ATTENTIONS:
        return _attention
    if op.name in _REDUCE_LAST:
        return _reduce_last
    if op.is_view or op.name in _NOT_POINTWISE:
        return _refuse
    return _pointwise


def _refuse(
    op: OpNode, operands: list[Operand], targets: list[Shape], tp: int
) -> list[Layout | None] | None:
    """Only replicated inputs are known to be right."""
    return None


def _identity(
    op: OpNode, operands: list[Operand], targets: list[Shape], tp: int
) -> list[Layout | None] | None:
    return [operands[0][1]]


def _reshape(
    op: OpNode, operands: list[Operand], targets: list[Shape], tp: int
) -> list[Layout | None] | None:
    shape, layout = operands[0]
    if layout is None:
        return None
    found = reshape_layout(layout, shape, targets[0], tp)
    return None if found is None else [found]


def _permuted(layout: Layout | None, order: Sequence[int]) -> Layout | None:
    """Layout after dims are reordered so that new dim i is old dim order[i]."""
    if layout is None or not layout.is_shard:
        return layout
    return shard(list(order).index(layout.dim), layout.outer)


def _transpose(
    op: OpNode, operands: list[Operand], targets: list[Shape], tp: int
) -> list[Layout | None] | None:
    shape, layout = operands[0]
    order = list(range(len(shape)))
    first, second = (-2, -1) if op.name == "t" else _int_arguments(op)[:2]
    order[first], order[second] = order[second], order[first]
    return [_permuted(layout, order)]


def _permute(
    op: OpNode, operands: list[Operand], targets: list[Shape], tp: int
) -> list[Layout | None] | None:
    shape, layout = operands[0]
    order = next(argument for argument in op.arguments if isinstance(argument, tuple))
    return [_permuted(layout, [int(dim) % len(shape) for dim in order])]


def _expand(
    op: OpNode, operands: list[Operand], targets: list[Shape], tp: int
) -> list[Layout | None] | None:
    shape, layout = operands[0]
    if layout is None or not layout.is_shard:
        return [layout]
    return [shard(layout.dim + len(targets[0]) - len(shape), layout.outer)]


def _split(
    op: OpNode, operands: list[Operand], targets: list[Shape], tp: int
) -> list[Layout | None] | None:
    shape, layout = operands[0]
    if layout is None:
        return None
    sizes = {target for target in targets}
    dim = next((d for d in range(len(shape)) if any(t[d] != shape[d] for t in sizes)), None)
    if dim is None:
        return [layout] * len(targets)
    if layout.is_shard and layout.dim == dim and len(sizes) > 1:
        return None
    found = segment_layout(layout, dim, shape[dim], targets[0][dim])
    return None if found is None else [found] * len(targets)


def _select(
    op: OpNode, operands: list[Operand], targets: list[Shape], tp: int
) -> list[Layout | None] | None:
    shape, layout = operands[0]
    if layout is None or not layout.is_shard:
        return [layout] * len(targets)
    integers = _int_arguments(op)
    dim = (integers[0] if integers else 0) % len(shape)
    if dim == layout.dim:
        return None
    moved = shard(layout.dim - (dim < layout.dim), layout.outer)
    return [moved] * len(targets)


def _one_layout(op: OpNode, operands: list[Operand], ndim: int) -> tuple[int, Layout | None]:
    """Dim along which operands are joined, and the layout that they share (None: they do not)."""
    integers = _int_arguments(op)
    layouts = {layout for _, layout in operands}
    return (integers[0] if integers else 0) % ndim, layouts.pop() if len(layouts) == 1 else None


def _cat(
    op: OpNode, operands: list[Operand], targets: list[Shape], tp: int
) -> list[Layout | None] | None:
    dim, layout = _one_layout(op, operands, len(targets[0]))
    return None if layout is None or (layout.is_shard and layout.dim == dim) else [layout]


def _stack(
    op: OpNode, operands: list[Operand], targets: list[Shape], tp: int
) -> list[Layout | None] | None:
    dim, layout = _one_layout(op, operands, len(targets[0]))
    if layout is None:
        return None
    if not layout.is_shard:
        return [layout]
    return [shard(layout.dim + (dim <= layout.dim), layout.outer)]


def _attention(
    op: OpNode, operands: list[Operand], targets: list[Shape], tp: int
) -> list[Layout | None] | None:
    """Heads (dim 1) or batch (dim 0) may be split, in q, k and v alike."""
    main = {layout for _, layout in operands[:3]}
    if len(main) != 1:
        return None
    layout = main.pop()
    if layout is None or layout.outer != 1 or layout.dim not in (0, 1):
        return None
    if not all(can_shard(shape, layout, tp) for shape, _ in operands[:3]):
        return None
    # Besides the output, kernels return the log-sum-exp (batch, heads, tokens) and random state.
    return [layout if len(target) >= 3 else REPLICATE for target in targets]


def _reduce_last(
    op: OpNode, operands: list[Operand], targets: list[Shape], tp: int
) -> list[Layout | None] | None:
    """Norms and softmax: any dim but the last may be split."""
    shape, layout = operands[0]
    if layout is None or layout.dim == len(shape) - 1:
        return None
    if any(other is not None and other.is_shard for _, other in operands[1:]):
        return None
    return [layout if len(target) > layout.dim else REPLICATE for target in targets]


def _reduction(
    op: OpNode, operands: list[Operand], targets: list[Shape], tp: int
) -> list[Layout | None] | None:
    """Means and sums over dims that are not split."""
    shape, layout = operands[0]
    dims = next((argument for argument in op.arguments if isinstance(argument, tuple)), None)
    if layout is None or dims is None:
        return None
    reduced = {int(dim) % len(shape) for dim in dims}
    if layout.dim in reduced:
        return None
    if len(targets[0]) == len(shape):
        return [layout]
    return [shard(layout.dim - sum(dim < layout.dim for dim in reduced), layout.outer)]


def _pointwise(
    op: OpNode, operands: list[Operand], targets: list[Shape], tp: int
) -> list[Layout | None] | None:
    """Same shape or broadcast; all split operands must be split alike, none whole beside them.

    A whole operand (not a constant) is accepted only where it is broadcast along the split dim.
    """
    target = targets[0]
    found: Layout | None = None
    for shape, layout in operands:
        if layout is not None and layout.is_shard:
            aligned = shard(layout.dim + len(target) - len(shape), layout.outer)
            if aligned.dim < 0 or shape[layout.dim] != target[aligned.dim]:
                return None
            if found is not None and found != aligned:
                return None
            found = aligned
    if found is None:
        return None
    for shape, layout in operands:
        dim = found.dim - (len(target) - len(shape))
        if layout == REPLICATE and dim >= 0 and shape[dim] != 1:
            return None
    return [found if len(shape) == len(target) else None for shape in targets]


def _int_arguments(op: OpNode) -> list[int]:
    return [a for a in op.arguments if isinstance(a, int) and not isinstance(a, bool)]


_RULES: dict[str, Rule] = {
    "t": _transpose,
    "transpose": _transpose,
    "permute": _permute,
    "expand": _expand,
    "split": _split,
    "split_with_sizes": _split,
    "slice": _split,
    "chunk": _split,
    "narrow": _split,
    "unbind": _select,
    "select": _select,
    "cat": _cat,
    "stack": _stack,
    "mean": _reduction,
    "sum": _reduction,
    "amax": _reduction,
    "var": _reduction,
    "view_as_complex": _identity,
    "view_as_real": _identity,
    "bmm": _refuse,
    "mm": _refuse,
    "addmm": _refuse,
    "baddbmm": _refuse,
}
