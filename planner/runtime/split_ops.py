"""How ops run on split tensors: each rank on its part, with the sizes that the part has.

The rules are those by which the planner chose the layouts; an op without one is refused, and so is
one whose result would need a collective. Those are at the edges of modules (``tensor_parallel``).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .layout import PARTIAL, REPLICATE, Layout, can_shard, shard, through_reshape
from .op_call import Call, Found, Operand, Shape, plain
from .op_rules import _pointwise, rule_of
from .product_rules import GRADIENT_RULES, PRODUCTS, grouped_shape, product_layouts, sum_layouts
from .split_tensor import Ranks, SplitTensor, is_over, layout_of
from .trees import Args, Function, Kwargs, Tree
from .unread import SplitError, UnreadTensor, refuse_unread

_SIZED = {"view": 1, "_unsafe_view": 1, "expand": 1, "slice_backward": 1, "select_backward": 1}
"""Ops that are told the sizes of their result, and the position of these."""

_JOINS = frozenset({"cat", "stack"})
"""Ops whose operands all lie alike."""

_PLACED = frozenset({"scatter", "scatter_add"})
"""Ops that write into a copy of their first operand, of which a rank needs its part alone."""

_MADE_WHOLE = frozenset(
    {"new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided", "scalar_tensor"}
)
"""Ops that read of a tensor no more than dtype and device."""


_LIKE_BASE = frozenset({"new_empty_strided", "as_strided"})
"""Ops by which autograd goes back through a change in place of a view: the gradient of its base
is copied, and that of the view is a view of the copy."""

_SUMMANDS = {
    **{"addmm": 0, "baddbmm": 0, "index_put": 0},
    **{"add": 1, "add_": 1, "sub": 1, "copy_": 1},
}
"""Position of what may be whole where the rest is a sum over ranks."""


@dataclass(frozen=True, slots=True)
class _Op:
    name: str
    is_pointwise: bool
    arguments: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Decision:
    """How an op runs on operands in certain layouts; the same for equal calls."""

    layouts: tuple[Layout, ...]
    """Layout of each output."""
    parts: tuple[Layout | None, ...]
    """For whole operands the layout of which each rank takes its part."""
    positions: dict[int, object]
    """Positional arguments as they are for the parts."""
    refusal: str = ""
    """Why it does not run, which whoever reads what it would leave is told."""
    takes_parts: bool = False
    """Whether each rank takes a part of a whole operand."""


_Key = tuple[Any, ...]
_DECISIONS: dict[_Key, _Decision] = {}
SPECIAL: dict[str, Any] = {}
"""Ops with a way of their own (``split_loss``): called with the op, its arguments and those by
name; ``NotImplemented`` where it is not theirs."""


class _Kind(NamedTuple):
    """What is known of an op, looked up once: all that runs for every op costs the host time."""

    name: str
    is_mutable: bool
    is_like_base: bool
    takes_no_values: bool
    """It reads nothing of its tensors but their dtype and device."""


_KINDS: dict[Function, _Kind] = {}


def _kind_of(func: Function) -> _Kind:
    kind = _KINDS.get(func)
    if kind is None:
        name = func.overloadpacket.__name__
        takes_no_values = name in _MADE_WHOLE or name == "_fused_sdp_choice"
        kind = _Kind(name, func._schema.is_mutable, name in _LIKE_BASE, takes_no_values)
        _KINDS[func] = kind
    return kind


def run_split(func: Function, args: Args, kwargs: Kwargs) -> Tree:
    """Run an op some of whose operands are split.

    What ranks have of them may be split in turn: it is run over the outer ranks, and what that
    runs on their parts over the inner ones.

    Raises:
        SplitError: It cannot run on them.
    """
    kind = _kind_of(func)
    if kind.name in SPECIAL:
        result = SPECIAL[kind.name](func, args, kwargs)
        if result is not NotImplemented:
            return result
    tensors = _tensors_in((*args, *kwargs.values()) if kwargs else args)
    refuse_unread(tensors)
    ranks = outermost(tensors)
    if kind.is_like_base and (made := _like_base(kind.name, args, ranks)) is not None:
        return made
    if kind.takes_no_values:
        return func(*_local(args), **_local(kwargs))
    key = _key(func, tensors, args, kwargs, ranks)
    decision = _DECISIONS.get(key)
    if decision is None:
        decision = _DECISIONS[key] = _decide(func, tensors, args, kwargs, ranks)
    return _run(func, kind, tensors, args, kwargs, decision, ranks)


def outermost(tensors: Sequence[Tensor]) -> Ranks:
    """Return the outer ones of the ranks over which tensors are split."""
    found: Ranks | None = None
    for each in tensors:
        if isinstance(each, SplitTensor) and (found is None or each.ranks.level > found.level):
            found = each.ranks
    assert found is not None
    return found


def _like_base(name: str, args: Args, ranks: Ranks) -> Tree:
    """Make a copy's place, or a whole tensor of another shape; None where it is neither."""
    source, size, stride = args[:3]
    whole, offset = torch.empty(size, device="meta"), args[3] if len(args) > 3 else 0
    is_whole = tuple(stride) == whole.stride() and whole.numel() == source.numel() and not offset
    layout = layout_of(source, ranks)
    if not is_whole or not layout.is_shard or not source.local.is_contiguous():
        return None
    found = through_reshape(layout, tuple(source.shape), tuple(size), ranks.size)
    if found is None:
        return None
    sizes = list(size)
    sizes[found.dim] //= ranks.size
    local = source.local.view(sizes)
    return SplitTensor(
        torch.empty_like(local) if name == "new_empty_strided" else local, found, ranks
    )


SplitTensor.run = run_split


def _key(
    func: Function, tensors: Sequence[Tensor], args: Args, kwargs: Kwargs, ranks: Ranks
) -> _Key:
    grad = torch.is_grad_enabled()
    level = ranks.level
    looks = [
        (
            each.shape,
            each.layout_over_ranks
            if isinstance(each, SplitTensor) and each.ranks.level == level
            else None,
            each.dtype,
            grad and each.requires_grad,
        )
        for each in tensors
    ]
    named = tuple((name, plain(value)) for name, value in kwargs.items()) if kwargs else ()
    return func, *looks, plain(args), named, ranks.size


def _decide(
    func: Function, tensors: Sequence[Tensor], args: Args, kwargs: Kwargs, ranks: Ranks
) -> _Decision:
    """Decide how an op runs."""
    call, found, parts = layouts_on_parts(func, tensors, args, kwargs, ranks)
    if found is None:
        refusal = f"{call}: no rule says how it runs on the parts"
        if func._schema.is_mutable or not call.targets:
            raise SplitError(refusal)
        return _Decision((), (), {}, refusal)
    is_same = layout_of(tensors[0], ranks) == found[0] if tensors else False
    if func._schema.is_mutable and not is_same:
        raise SplitError(f"{call}: it would write a part over what is not split so")
    positions = _positions(call, found, call.targets, ranks.size)
    takes_parts = any(each is not None for each in parts)
    return _Decision(tuple(found), parts, positions, takes_parts=takes_parts)


def layouts_on_parts(
    func: Function, tensors: Sequence[Tensor], args: Args, kwargs: Kwargs, ranks: Ranks
) -> tuple[Call, Found, tuple[Layout | None, ...]]:
    """Lay out what an op makes of the parts.

    Returns:
        The call; the layout of each result, None where no rule knows them; and for whole operands
        that of the part that each rank takes.

    Raises:
        SplitError: Each rank would know a part of the gradient of a whole operand.
    """
    name = func.overloadpacket.__name__
    if name == "_grouped_mm":  # on the meta device it takes bfloat16 only
        targets = [grouped_shape([tuple(each.shape) for each in tensors])]
    else:
        results = _tensors_in((_on_meta(func, args, kwargs),))
        targets = [tuple(each.shape) for each in results]
    op = _Op(name, torch.Tag.pointwise in func.tags, plain(args))
    call = Call(op, [_operand(each, ranks) for each in tensors], targets)
    _check_gradients(call, tensors, ranks)
    found, parts = _layouts(call, ranks.size)
    lies_evenly = found is not None and all(
        can_shard(target, layout, ranks.size) for layout, target in zip(found, targets, strict=True)
    )
    return call, found if lies_evenly else None, parts


def _operand(tensor: Tensor, ranks: Ranks) -> Operand:
    shape = tuple(tensor.shape)
    if not is_over(tensor, ranks):
        return Operand(shape, None)
    layout = tensor.layout_over_ranks
    return Operand(shape, layout if layout.is_shard or layout == PARTIAL else None)


def _check_gradients(call: Call, tensors: Sequence[Tensor], ranks: Ranks) -> None:
    """Refuse a whole tensor whose gradient each rank would know a part of."""
    if not torch.is_grad_enabled():
        return
    joins_parts = call.op.name in _JOINS and any(each.split for each in call.operands)
    for each in tensors:
        is_split = is_over(each, ranks) and not (
            joins_parts and not each.layout_over_ranks.is_shard
        )
        if each.requires_grad and not is_split:
            raise SplitError(
                f"{call}: the one of shape {tuple(each.shape)} is whole, and each rank "
                "would know a part of its gradient only"
            )


def _layouts(call: Call, tp: int) -> tuple[Found, tuple[Layout | None, ...]]:
    """Lay out the outputs, and the parts that are taken of whole operands."""
    name, none = call.op.name, (None,) * len(call.operands)
    layouts = [each.layout for each in call.operands]
    if PARTIAL in layouts:
        return sum_layouts(call), none
    if not any(each.split for each in call.operands):
        # Whole on each rank, with a gradient of which each knows a part.
        return [Layout("replicate_partial_grad")] * len(call.targets), none
    if name in PRODUCTS:
        found, wanted = product_layouts(call, tp)
        return found, tuple(wanted)
    rule = GRADIENT_RULES.get(name) or rule_of(call.op)
    found = None if rule is None else rule(call, tp)
    if found is None:
        return None, none
    if name in _JOINS:
        shared = next(each.split for each in call.operands if each.split)
        return found, tuple(None if each.split else shared for each in call.operands)
    if rule is _pointwise or "attention" in name or name in _PLACED:
        return found, tuple(_part_along(each, call, found) for each in call.operands)
    return found, none


def _part_along(operand: Operand, call: Call, found: Sequence[Layout]) -> Layout | None:
    """The part of a whole operand that a rank needs beside its part of the result."""
    split = next(each for each in found if each.is_shard)
    ndim = max(len(each.shape) for each in call.operands)
    dim = split.dim - (ndim - len(operand.shape))
    if operand.split or dim < 0 or operand.shape[dim] == 1:
        return None
    return shard(dim, split.outer)


def _positions(
    call: Call, found: Sequence[Layout], targets: Sequence[Shape], tp: int
) -> dict[int, object]:
    """Rewrite sizes and places that are those of the whole."""
    name, arguments = call.op.name, call.op.arguments
    layout = found[0] if found else REPLICATE
    if name in _SIZED and layout.is_shard:
        sizes = list(targets[0])
        sizes[layout.dim] //= tp
        positions: dict[int, object] = {_SIZED[name]: sizes}
        if (
            name == "slice_backward"
            and layout.outer > 1
            and call.dim(2, 0, len(sizes)) == layout.dim
        ):
            positions |= {i: _per_rank(arguments[i], tp) for i in (3, 4)}
        return positions
    split = call.first.split
    if split is None or name not in ("split", "split_with_sizes", "slice"):
        return {}
    ndim = len(call.first.shape)
    if name == "slice":
        places = {i: arguments[i] for i in (2, 3) if len(arguments) > i}
        if split.dim != call.dim(1, 0, ndim) or split.outer == 1:
            return {}
        # A whole segment of a dim of ``outer`` segments, each of which is split.
        return {i: _per_rank(place, tp) for i, place in places.items()}
    if split.dim != call.dim(2, 0, ndim):
        return {}
    return {1: _per_rank(arguments[1], tp)}


def _per_rank(value: object, tp: int) -> object:
    if isinstance(value, tuple):
        return [_per_rank(each, tp) for each in value]
    return value // tp if isinstance(value, int) and abs(value) < 2**62 else value


def _run(
    func: Function,
    kind: _Kind,
    tensors: Sequence[Tensor],
    args: Args,
    kwargs: Kwargs,
    decision: _Decision,
    ranks: Ranks,
) -> Tree:
    """Run an op on the parts and wrap what it leaves."""
    if decision.refusal:
        unread = partial(UnreadTensor, device=tensors[0].device, refusal=decision.refusal)
        return _mapped(_on_meta(func, args, kwargs), unread)
    if decision.takes_parts:
        parts = iter(_parts(tensors, decision, ranks))
    else:
        level = ranks.level
        parts = iter(
            [
                each.local
                if isinstance(each, SplitTensor) and each.ranks.level == level
                else each
                for each in tensors
            ]
        )
    local_args = [
        next(parts)
        if isinstance(each, Tensor)
        else _with_parts(each, parts)
        if isinstance(each, list | tuple)
        else each
        for each in args
    ]
    local_kwargs = {name: _with_parts(value, parts) for name, value in kwargs.items()}
    for i, each in decision.positions.items():
        local_args[i] = each
    if PARTIAL in decision.layouts and ranks.rank > 0:
        local_args = list(_without_summand(kind.name, tensors, tuple(local_args), ranks))
    result = _call(func, kind.name, local_args, local_kwargs)
    if kind.is_mutable:
        return args[0]
    if isinstance(result, Tensor):
        return _wrap(result, decision.layouts[0], ranks)
    layouts = iter(decision.layouts)
    return _mapped(result, lambda local: _wrap(local, next(layouts), ranks))


def _parts(tensors: Sequence[Tensor], decision: _Decision, ranks: Ranks) -> Iterator[Tensor]:
    """What this rank takes of each operand: its part, also of some that are whole."""
    for tensor, wanted in zip(tensors, decision.parts, strict=True):
        local = tensor.local if is_over(tensor, ranks) else tensor
        is_whole = wanted is not None and local.shape == tensor.shape
        yield ranks.part(local, wanted) if is_whole and wanted is not None else local


def _with_parts(value: Tree, parts: Iterator[Tensor]) -> Tree:
    """Put parts in the places of tensors, in order."""
    return _mapped(value, lambda _: next(parts))


def _wrap(local: Tensor, layout: Layout, ranks: Ranks) -> Tensor:
    if isinstance(local, UnreadTensor):
        sizes = list(local.shape)
        if layout.is_shard:
            sizes[layout.dim] *= ranks.size
        whole = torch.empty(sizes, dtype=local.dtype, device="meta")
        return UnreadTensor(whole, local.device, local.refusal)
    return local if layout == REPLICATE else SplitTensor(local, layout, ranks)


def _without_summand(name: str, tensors: Sequence[Tensor], args: Args, ranks: Ranks) -> Args:
    """Leave out what is whole and is added to a sum over ranks: the first rank adds it."""
    position = _SUMMANDS.get(name)
    if position is None or not isinstance(args[position], Tensor | int | float):
        return args
    if position < len(tensors) and layout_of(tensors[position], ranks) == PARTIAL:
        return args
    value = args[position]
    zero = torch.zeros_like(value) if isinstance(value, Tensor) else 0
    return (*args[:position], zero, *args[position + 1 :])


def _call(func: Function, name: str, args: Sequence[Any], kwargs: Kwargs) -> Tree:
    """Run an op; a view of memory that lies otherwise than the whole's is a copy."""
    if name not in ("view", "_unsafe_view"):
        return func(*args, **kwargs)
    try:
        return func(*args, **kwargs)
    except RuntimeError:
        return args[0].reshape(args[1])


def _on_meta(func: Function, args: Args, kwargs: Kwargs) -> Tree:
    """Run an op on the meta device, for the shapes of its results."""

    def meta(value: Tree) -> Tree:
        if isinstance(value, Tensor):
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        return torch.device("meta") if isinstance(value, torch.device) else value

    mapped = {name: _mapped(value, meta, leaves=True) for name, value in kwargs.items()}
    return func(*_mapped(args, meta, leaves=True), **mapped)


def _tensors_in(values: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors_in(value)
    return found


def _mapped(value: Tree, change: Callable[..., Tree], *, leaves: bool = False) -> Tree:
    """Change the tensors in arguments or results, or all leaves."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(each, change, leaves=leaves) for each in value)
    return change(value) if leaves else value


def _local(value: Tree) -> Tree:
    if isinstance(value, dict):
        return {name: _local(each) for name, each in value.items()}
    return _mapped(value, lambda each: each.local if isinstance(each, SplitTensor) else each)
