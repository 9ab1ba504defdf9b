"""Ops on split tensors: each rank runs them on its part, with the sizes that the part has.

A hundred of them are in a block: what is decided about one (``split_decisions``) is kept.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .layout import PARTIAL, REPLICATE, Layout, through_reshape
from .op_call import plain
from .split_decisions import Decision, decide, mapped, on_meta, tensors_in
from .split_tensor import Ranks, SplitTensor, is_over, layout_of
from .trees import Args, Function, Kwargs, Tree
from .unread import UnreadTensor, refuse_unread

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


_Key = tuple[Any, ...]
_DECISIONS: dict[_Key, Decision] = {}
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
    tensors = tensors_in((*args, *kwargs.values()) if kwargs else args)
    refuse_unread(tensors)
    ranks = outermost(tensors)
    if kind.is_like_base and (made := _like_base(kind.name, args, ranks)) is not None:
        return made
    if kind.takes_no_values:
        return func(*_local(args), **_local(kwargs))
    key = _key(func, tensors, args, kwargs, ranks)
    decision = _DECISIONS.get(key)
    if decision is None:
        decision = _DECISIONS[key] = decide(func, tensors, args, kwargs, ranks)
    return _run(func, tensors, args, kwargs, (kind, decision, ranks))


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
    named = [(name, plain(value)) for name, value in kwargs.items()]
    return func, *looks, *map(_looks_of, args), *named, ranks.size


def _looks_of(value: Tree) -> Tree:
    """Tell arguments apart, as ``plain`` does."""
    if isinstance(value, Tensor):
        return None
    if isinstance(value, list | tuple) and value and type(value[0]) is int:
        return tuple(value)
    return plain(value)


def _run(
    func: Function,
    tensors: Sequence[Tensor],
    args: Args,
    kwargs: Kwargs,
    how: tuple[_Kind, Decision, Ranks],
) -> Tree:
    """Run an op on the parts and wrap what it leaves."""
    kind, decision, ranks = how
    if decision.refusal:
        unread = partial(UnreadTensor, device=tensors[0].device, refusal=decision.refusal)
        return mapped(on_meta(func, args, kwargs), unread)
    if decision.takes_parts:
        parts = iter(_parts(tensors, decision, ranks))
    else:
        level = ranks.level
        parts = iter(
            [
                each.local if isinstance(each, SplitTensor) and each.ranks.level == level else each
                for each in tensors
            ]
        )
    local_args = [_with_parts(value, parts) for value in args]
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
    return mapped(result, lambda local: _wrap(local, next(layouts), ranks))


def _parts(tensors: Sequence[Tensor], decision: Decision, ranks: Ranks) -> Iterator[Tensor]:
    """What this rank takes of each operand: its part, also of some that are whole."""
    for tensor, wanted in zip(tensors, decision.parts, strict=True):
        local = tensor.local if is_over(tensor, ranks) else tensor
        is_whole = wanted is not None and local.shape == tensor.shape
        yield ranks.part(local, wanted) if is_whole and wanted is not None else local


def _with_parts(value: Tree, parts: Iterator[Tensor]) -> Tree:
    """Put parts in the places of tensors, in order."""
    if isinstance(value, Tensor):
        return next(parts)
    if isinstance(value, list | tuple) and value and type(value[0]) is not int:
        return type(value)(next(parts) if isinstance(e, Tensor) else e for e in value)
    return value


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


def _local(value: Tree) -> Tree:
    if isinstance(value, dict):
        return {name: _local(each) for name, each in value.items()}
    return mapped(value, lambda each: each.local if isinstance(each, SplitTensor) else each)
