"""What each op does to the layout of its operands: the legal placements per op.

An op may run on shards for one of two reasons, and stays whole without one:

* torch itself tags it ``torch.Tag.pointwise``, the source that all else yields to; the trace
  keeps the tag in ``OpNode.is_pointwise``. The tag belongs to an overload: that of ``max`` of two
  tensors, not that of ``max`` along a dim.
* ``NAMED_RULES`` names it. The rules say what torch's documentation says of these ops, and the
  differential test runs each of them on shards against the whole tensor.

The planner asks ``rule_of`` for the ops of its graph, and the training script for those that it
runs: what is planned by these rules is run by them.
"""

from collections.abc import Iterable, Sequence
from math import gcd, prod

from .layout import REPLICATE, Layout, shard
from .layout import through_reshape as reshape_layout
from .layout import through_segments as segment_layout
from .op_call import Call, Found, Op, Operand, Rule, Shape

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


def head_copies(heads: int, ranks: int) -> int:
    """How often each head of keys and values is sent, so that each rank gets the same number.

    Grouped queries that lie on several ranks all need the one head of their group.
    """
    return ranks // gcd(heads, ranks)


def _same(call: Call, _: int) -> Found:
    """The result lies as the first operand does, of which it has the leading dims."""
    split, shape = call.first.split, call.first.shape
    if split is None or any(target[: len(shape)] != shape for target in call.targets):
        return None
    return [split] * len(call.targets)


def _pairs_as_complex(call: Call, _: int) -> Found:
    """The last dim, of size 2, becomes one number."""
    split = call.first.split
    return None if split is None or split.dim == len(call.first.shape) - 1 else [split]


def _reshape(call: Call, tp: int) -> Found:
    """Views that keep the order of elements."""
    split, shape, target = call.first.split, call.first.shape, call.targets[0]
    # ``view`` as another dtype has another number of elements.
    if split is None or prod(shape) != prod(target) or not prod(shape):
        return None
    found = reshape_layout(split, shape, target, tp)
    return None if found is None else [found]


def _squeeze(call: Call, tp: int) -> Found:
    """Drop dims of size 1; without dims named, a shard of size 1 would be dropped too."""
    split, shape = call.first.split, call.first.shape
    if split is None or (len(call.op.arguments) < 2 and shape[split.dim] == tp):
        return None
    return _reshape(call, tp)


def _permuted(call: Call, order: Sequence[int]) -> Found:
    """New dim i is old dim ``order[i]``."""
    split = call.first.split
    return None if split is None else [shard(list(order).index(split.dim), split.outer)]


def _transpose(call: Call, _: int) -> Found:
    ndim = len(call.first.shape)
    order = list(range(ndim))
    first, second = call.dim(1, 0, ndim), call.dim(2, min(ndim, 2) - 1, ndim)
    order[first], order[second] = order[second], order[first]
    return _permuted(call, order)


def _permute(call: Call, _: int) -> Found:
    return _permuted(call, _dims(call, 1))


def _expand(call: Call, _: int) -> Found:
    """New dims come first; a dim that is repeated has size 1 and is never split."""
    split = call.first.split
    new = len(call.targets[0]) - len(call.first.shape)
    return None if split is None else [shard(split.dim + new, split.outer)]


def _split(call: Call, _: int) -> Found:
    """Pieces along dim ``arguments[2]``, sized or numbered as ``arguments[1]`` says."""
    split, shape = call.first.split, call.first.shape
    dim = call.dim(2, 0, len(shape))
    sizes = [target[dim] for target in call.targets]
    if len(set(sizes)) == 1:
        return _segments(call, dim, sizes[0])
    if split is None or split.dim != dim:
        return _beside(call, dim)
    segment = shape[dim] // split.outer
    if any(size % segment or not size for size in sizes):
        return None
    return [shard(dim, size // segment) for size in sizes]


def _slice(call: Call, _: int) -> Found:
    """Dim, start, end and step: along the split dim one whole segment, or all of it."""
    shape = call.first.shape
    dim = call.dim(1, 0, len(shape))
    size, piece = shape[dim], call.targets[0][dim]
    start = call.argument(2, None)
    first = start if isinstance(start, int) else 0
    is_segment = call.argument(4, 1) == 1 and piece > 0 and first % piece == 0
    return _segments(call, dim, piece) if is_segment or piece == size else _beside(call, dim)


def _beside(call: Call, dim: int) -> Found:
    """Keep the shard where another dim than ``dim`` is split."""
    split = call.first.split
    return None if split is None or split.dim == dim else [split] * len(call.targets)


def _segments(call: Call, dim: int, piece: int) -> Found:
    """Take pieces of one size, each starting at a multiple of it, along a dim."""
    split, size = call.first.split, call.first.shape[dim]
    if split is None or piece == size:
        return None if split is None else [split] * len(call.targets)
    found = segment_layout(split, dim, size, piece)
    return None if found is None else [found] * len(call.targets)


def _select(call: Call, _: int) -> Found:
    """One or all positions along a dim, which vanishes."""
    split, dim = call.first.split, call.dim(1, 0, len(call.first.shape))
    if split is None or split.dim == dim:
        return None
    return [shard(split.dim - (dim < split.dim), split.outer)] * len(call.targets)


def _shared(call: Call) -> Layout | None:
    """The shard that all operands have, None where they differ in it or in their dims.

    A constant is sliced as they are: zeros for a piece that gets no gradient, say.
    """
    splits = {each.split for each in call.operands if each.layout is not None}
    if len(splits) != 1 or len({len(each.shape) for each in call.operands}) > 1:
        return None
    (split,) = splits
    has_constants = any(each.layout is None for each in call.operands)
    return None if split is not None and has_constants and split.outer > 1 else split


def _cat(call: Call, _: int) -> Found:
    split, dim = _shared(call), call.dim(1, 0, len(call.targets[0]))
    return None if split is None or split.dim == dim else [split]


def _stack(call: Call, _: int) -> Found:
    split, dim = _shared(call), call.dim(1, 0, len(call.targets[0]))
    return None if split is None else [shard(split.dim + (dim <= split.dim), split.outer)]


def _attention(call: Call, _: int) -> Found:
    """Heads (dim 1) or batch (dim 0) may be split, in q, k and v alike.

    A mask or bias has the same dims or is broadcast along the split one.
    """
    split = call.first.split
    if split is None or split.dim not in (0, 1):
        return None
    if any(each.split != split for each in call.operands[1:3]):
        return None
    rest, ndim = call.operands[3:], len(call.first.shape)
    if not all(_lies_along(each, split, ndim) for each in rest):
        return None
    # Besides the output, kernels return the log-sum-exp (batch, heads, tokens) and random state.
    return [split if len(target) >= 3 else REPLICATE for target in call.targets]


def _repeated(call: Call, _: int) -> Found:
    """Each head (dim 1) several times in a row, so that shards of heads stay shards of them."""
    return None if call.first.split is None else [call.first.split]


def _beside_last(call: Call, normalized: int) -> Found:
    """Normalise over the last dims: any other dim of the first operand may be split."""
    split, shape = call.first.split, call.first.shape
    if split is None or split.dim >= len(shape) - normalized:
        return None
    if any(each.split is not None for each in call.operands[1:]):
        return None
    return [split] * len(call.targets)


def _norm(call: Call, _: int) -> Found:
    """Norms over the dims of ``arguments[1]``, which are the last ones."""
    sizes = call.argument(1, ())
    assert isinstance(sizes, tuple), f"{call.op.name} has no sizes"
    return _beside_last(call, len(sizes))


def _softmax(call: Call, _: int) -> Found:
    return _beside(call, call.dim(1, -1, len(call.first.shape)))


def _dims(call: Call, position: int) -> tuple[int, ...]:
    """An argument that holds one or several dims, () where there is none."""
    ndim = max(len(call.first.shape), 1)
    found = call.argument(position, ())
    if isinstance(found, int) and not isinstance(found, bool):
        return (found % ndim,)
    return tuple(int(dim) % ndim for dim in found) if isinstance(found, tuple) else ()


def _reduction(call: Call, _: int, position: int = 1) -> Found:
    """Reduce over dims that are not split; without dims an op reduces over all of them."""
    split, shape = call.first.split, call.first.shape
    dims = set(_dims(call, position))
    if split is None or not dims or split.dim in dims:
        return None
    if len(call.targets[0]) == len(shape):
        return [split] * len(call.targets)
    left = shard(split.dim - sum(dim < split.dim for dim in dims), split.outer)
    return [left] * len(call.targets)


def _topk(call: Call, _: int) -> Found:
    """The largest along a dim, and their places."""
    return _beside(call, call.dim(2, -1, len(call.first.shape)))


def picked(call: Call, _: int, *, first: int = 0) -> Found:
    """Elements along a dim by their places in it: all lie alike along another, and are as long.

    Args:
        call: The op.
        first: Operand from which on they do.
    """
    dim, operands = call.dim(1, 0, len(call.first.shape)), call.operands
    split = operands[-1].split
    if split is None or split.dim == dim or any(each.split != split for each in operands[first:]):
        return None
    sizes = {each.shape[split.dim] for each in operands}
    return [split] if len(sizes) == 1 else None


def _vector_norm(call: Call, tp: int) -> Found:
    """A norm along dims; the order of the norm comes first."""
    return _reduction(call, tp, position=2)


def _pointwise(call: Call, _: int) -> Found:
    """Same shape or broadcast; all split operands must be split alike, none whole beside them.

    A whole operand (not a constant) is accepted only where it is broadcast along the split dim.
    """
    target = call.targets[0]
    if target != _broadcast(each.shape for each in call.operands):
        return None
    aligned = {
        shard(each.split.dim + len(target) - len(each.shape), each.split.outer)
        for each in call.operands
        if each.split is not None
    }
    if len(aligned) != 1:
        return None
    (found,) = aligned
    if not all(_lies_along(each, found, len(target)) for each in call.operands):
        return None
    # Some kernels leave an empty buffer beside their result.
    if any(shape != target and prod(shape) for shape in call.targets):
        return None
    return [found if shape == target else REPLICATE for shape in call.targets]


def _broadcast(shapes: Iterable[Shape]) -> Shape:
    """The shape to which shapes are broadcast, which torch has checked to fit."""
    sizes: list[int] = []
    for shape in shapes:
        sizes = [1] * (len(shape) - len(sizes)) + sizes
        for back, size in enumerate(reversed(shape), start=1):
            sizes[-back] = size if sizes[-back] == 1 else sizes[-back]
    return tuple(sizes)


def _lies_along(operand: Operand, found: Layout, ndim: int) -> bool:
    """Whether a rank has what it needs of an operand beside shards of a result with ndim dims."""
    dim = found.dim - (ndim - len(operand.shape))
    if dim < 0 or operand.shape[dim] == 1:
        return operand.split is None
    return operand.layout is None or operand.split == shard(dim, found.outer)


NAMED_RULES: dict[str, Rule] = {
    "alias": _same,
    "detach": _same,
    "_to_copy": _same,
    "view_as_real": _same,
    "zeros_like": _same,
    "ones_like": _same,
    "full_like": _same,
    "empty_like": _same,
    "view_as_complex": _pairs_as_complex,
    "view": _reshape,
    "_unsafe_view": _reshape,
    "unsqueeze": _reshape,
    "squeeze": _squeeze,
    "t": _transpose,
    "transpose": _transpose,
    "permute": _permute,
    "expand": _expand,
    "split": _split,
    "split_with_sizes": _split,
    "slice": _slice,
    "unbind": _select,
    "select": _select,
    "cat": _cat,
    "stack": _stack,
    "native_layer_norm": _norm,
    "_fused_rms_norm": _norm,
    "_softmax": _softmax,
    "_safe_softmax": _softmax,
    "_log_softmax": _softmax,
    **dict.fromkeys(
        (
            *("mean", "sum", "prod", "logsumexp", "var", "std", "var_mean", "std_mean"),
            *("amax", "amin", "max", "min", "argmax", "argmin", "all", "any"),
        ),
        _reduction,
    ),
    "linalg_vector_norm": _vector_norm,
    "topk": _topk,
    "gather": picked,
    "scatter": picked,
    "scatter_": picked,
    # Elementwise by definition, though torch does not tag them. Each element that dropout
    # zeroes is drawn by itself, so that a rank may draw for its part.
    "native_dropout": _pointwise,
    "copy_": _pointwise,
    "fill": _pointwise,
    "fill_": _pointwise,
    "zero_": _pointwise,
    "masked_fill": _pointwise,
    "masked_fill_": _pointwise,
    "rsub": _pointwise,
    "hardswish": _pointwise,
    "log_sigmoid_forward": _pointwise,
    "_repeat_heads": _repeated,
    **dict.fromkeys(ATTENTIONS, _attention),
}
"""Ops that may run on shards though torch does not tag them pointwise, by name."""


def rule_of(op: Op) -> Rule | None:
    """Return the rule by which an op may run on shards, None where it must stay whole."""
    return _pointwise if op.is_pointwise else NAMED_RULES.get(op.name)
