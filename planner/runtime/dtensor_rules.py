"""What DTensor lacks for split regions: the only private names of torch's DTensor."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from .trees import Args, Function, Kwargs, Tree

_aten = torch.ops.aten


def install_dtensor_rules() -> None:
    """Teach DTensor what it lacks: attention on the CPU, fused projections, strided views."""
    if _aten.cat.default in _handlers():
        return
    _install_cpu_attention()
    handlers = _handlers()
    handlers[_aten.cat.default] = _cat_parts
    handlers[_aten.split.Tensor] = handlers[_aten.split_with_sizes.default] = _split_parts
    handlers[_aten.slice.Tensor] = _slice_parts
    handlers[_aten.view.default] = handlers[_aten._unsafe_view.default] = _view_or_copy


def _handlers() -> dict[Any, Any]:
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    return handlers


def _without_handler(op: Function, args: Args, kwargs: Kwargs) -> Tree:
    handlers = _handlers()
    handler = handlers.pop(op)
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = handler


def _install_cpu_attention() -> None:
    """Register shardings of CPU attention: over heads, over samples, or none."""

    def mask_placement(mask: Tree, kept: Placement) -> list[Placement | None]:
        if mask is None:
            return []
        dim = kept.dim if isinstance(kept, Shard) else None
        splits = dim is not None and len(mask.shape) == 4 and mask.shape[dim] != 1
        return [kept if splits else Replicate()]

    # Arguments before the mask: q, k, v, dropout, causal; and in backward the gradient, q, k, v,
    # output, logsumexp, dropout, causal. Each list is outputs, then inputs.
    kept_dims: tuple[Placement, ...] = (Replicate(), Shard(1), Shard(0))

    def forward_rule(*_args: Tree, attn_mask: Tree = None, **_kwargs: Tree) -> list[Tree]:
        return [
            ([kept] * 2, [kept] * 3 + [None] * 2 + mask_placement(attn_mask, kept))
            for kept in kept_dims
        ]

    def backward_rule(*_args: Tree, attn_mask: Tree = None, **_kwargs: Tree) -> list[Tree]:
        return [
            ([kept] * 3, [kept] * 6 + [None] * 2 + mask_placement(attn_mask, kept))
            for kept in kept_dims
        ]

    register_sharding(_aten._scaled_dot_product_flash_attention_for_cpu.default)(forward_rule)
    backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    register_sharding(backward)(backward_rule)


def _wrap_local(
    local: Tensor, like: DTensor, placements: Sequence[Any], shape: Sequence[int]
) -> DTensor:
    """Make a DTensor of a local tensor with contiguous global strides, outside autograd."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    meta = TensorMeta(torch.Size(shape), tuple(reversed(strides)), local.dtype)
    spec = DTensorSpec(like.device_mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=local.requires_grad)  # type: ignore[no-untyped-call]


def _parts_axis(x: DTensor, dim: int) -> tuple[int, int] | None:
    """Return mesh dim and number of parts where ``x`` is a concatenation of split parts."""
    for axis, kept in enumerate(x.placements):
        if isinstance(kept, _StridedShard) and kept.dim == dim:
            return axis, int(kept.split_factor)
    return None


def _cat_parts(op: Function, args: Args, kwargs: Kwargs) -> Tree:
    """Concatenate parts that are split alike along the concatenated dim without communication."""
    parts = args[0]
    if not all(isinstance(part, DTensor) for part in parts) or len(parts) < 2:
        return _without_handler(op, args, kwargs)
    first = parts[0]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % first.ndim
    alike = all(p.placements == first.placements and p.shape == first.shape for p in parts)
    for axis, kept in enumerate(first.placements):
        even = first.shape[dim] % first.device_mesh.size(axis) == 0
        if alike and even and type(kept) is Shard and kept.dim == dim:
            local = torch.cat([part._local_tensor for part in parts], dim)
            placements = list(first.placements)
            placements[axis] = _StridedShard(dim, split_factor=len(parts))
            shape = list(first.shape)
            shape[dim] *= len(parts)
            return _wrap_local(local, first, placements, shape)
    return _without_handler(op, args, kwargs)


def _split_parts(op: Function, args: Args, kwargs: Kwargs) -> Tree:
    """Split a concatenation of split parts into the parts, as local views."""
    x, sizes = args[0], args[1]
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % x.ndim
    parts = _parts_axis(x, dim)
    if parts is not None:
        axis, count = parts
        size = x.shape[dim] // count
        expected = size if isinstance(sizes, int) else [size] * count
        if (sizes if isinstance(sizes, int) else list(sizes)) == expected:
            return [_part(x, axis, dim, count, index) for index in range(count)]
    return _without_handler(op, args, kwargs)


def _slice_parts(op: Function, args: Args, kwargs: Kwargs) -> Tree:
    """Take one part out of a concatenation of split parts, as a local view."""
    x, dim = args[0], (args[1] if len(args) > 1 else 0) % args[0].ndim
    parts = _parts_axis(x, dim)
    if parts is not None:
        axis, count = parts
        size = x.shape[dim] // count
        start = args[2] if len(args) > 2 and args[2] is not None else 0
        end = args[3] if len(args) > 3 and args[3] is not None else x.shape[dim]
        step = args[4] if len(args) > 4 else 1
        if step == 1 and start % size == 0 and min(end, x.shape[dim]) - start == size:
            return _part(x, axis, dim, count, start // size)
    return _without_handler(op, args, kwargs)


def _part(x: DTensor, axis: int, dim: int, count: int, index: int) -> DTensor:
    size = x._local_tensor.shape[dim] // count
    local = x._local_tensor.narrow(dim, index * size, size)
    placements = list(x.placements)
    placements[axis] = Shard(dim)
    shape = list(x.shape)
    shape[dim] //= count
    return _wrap_local(local, x, placements, shape)


def _view_or_copy(op: Function, args: Args, kwargs: Kwargs) -> Tree:
    """View; copy first where the local strides differ from the global ones and forbid it."""
    try:
        return _without_handler(op, args, kwargs)
    except RuntimeError as error:
        if "view size is not compatible" not in str(error):
            raise
        x = args[0]
        copied = _wrap_local(x._local_tensor.contiguous(), x, x.placements, x.shape)
        return _without_handler(op, (copied, *args[1:]), kwargs)
