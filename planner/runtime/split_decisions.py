"""How an op runs on split tensors: the layouts of what it leaves, and what changes in its call.

The rules are those by which the planner chose the layouts; an op without one is refused, and so is
one whose result would need a collective. Those are at the edges of modules (``tensor_parallel``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .layout import PARTIAL, REPLICATE, Layout, can_shard, shard
from .op_call import Call, Found, Operand, Shape, plain
from .op_rules import _pointwise, rule_of
from .product_rules import GRADIENT_RULES, PRODUCTS, grouped_shape, product_layouts, sum_layouts
from .split_tensor import Ranks, is_over, layout_of
from .trees import Args, Function, Kwargs, Tree
from .unread import SplitError

_SIZED = {"view": 1, "_unsafe_view": 1, "expand": 1, "slice_backward": 1, "select_backward": 1}
"""Ops that are told the sizes of their result, and the position of these."""

_JOINS = frozenset({"cat", "stack"})
"""Ops whose operands all lie alike."""

_PLACED = frozenset({"scatter", "scatter_add"})
"""Ops that write into a copy of their first operand, of which a rank needs its part alone."""


@dataclass(frozen=True, slots=True)
class _Op:
    name: str
    is_pointwise: bool
    arguments: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Decision:
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


def decide(
    func: Function, tensors: Sequence[Tensor], args: Args, kwargs: Kwargs, ranks: Ranks
) -> Decision:
    """Decide how an op runs."""
    call, found, parts = layouts_on_parts(func, tensors, args, kwargs, ranks)
    if found is None:
        refusal = f"{call}: no rule says how it runs on the parts"
        if func._schema.is_mutable or not call.targets:
            raise SplitError(refusal)
        return Decision((), (), {}, refusal)
    is_same = layout_of(tensors[0], ranks) == found[0] if tensors else False
    if func._schema.is_mutable and not is_same:
        raise SplitError(f"{call}: it would write a part over what is not split so")
    positions = _positions(call, found, call.targets, ranks.size)
    takes_parts = any(each is not None for each in parts)
    return Decision(tuple(found), parts, positions, takes_parts=takes_parts)


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
        results = tensors_in((on_meta(func, args, kwargs),))
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


def on_meta(func: Function, args: Args, kwargs: Kwargs) -> Tree:
    """Run an op on the meta device, for the shapes of its results."""

    def meta(value: Tree) -> Tree:
        if isinstance(value, Tensor):
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        return torch.device("meta") if isinstance(value, torch.device) else value

    named = {name: mapped(value, meta, leaves=True) for name, value in kwargs.items()}
    return func(*mapped(args, meta, leaves=True), **named)


def tensors_in(values: Sequence[Any]) -> list[Tensor]:
    """List the tensors among arguments or results, in lists too."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
    return found


def mapped(value: Tree, change: Callable[..., Tree], *, leaves: bool = False) -> Tree:
    """Change the tensors in arguments or results, or all leaves."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(mapped(each, change, leaves=leaves) for each in value)
    return change(value) if leaves else value
