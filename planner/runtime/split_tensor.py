"""A tensor of which each rank of the tp axis holds its part, and which looks whole.

The user's code sees shapes of the whole tensor: views, expands and masks are written for them, and
so are rotary tables. Ops run on the parts, by the rules of ``op_rules`` (``split_ops``).

What a rank of cp holds may be split over tp in turn: its part is a split tensor itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import Collectives
from .layout import PARTIAL, REPLICATE, REPLICATE_PARTIAL_GRAD, Layout
from .promise import Promise
from .trees import Args, Function, Kwargs, Tree, alias_of
from .unread import SplitError, refuse_unread


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Ranks:
    """The ranks of the tp axis, and what they do together."""

    rank: int
    """Position of this one."""
    size: int
    """How many there are."""
    group: dist.ProcessGroup | None
    """None in a dry run, where nothing but shapes is known."""
    level: int = 0
    """0 where their parts are plain tensors, 1 where they may be split over ranks of level 0."""
    collectives: ClassVar[Collectives] = Collectives()
    """How they are called; ``split_compiled`` has others."""

    def reduced(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Return the sum over ranks, or what else ``op`` says."""
        return self.collectives.all_reduce(tensor, op, self.group)

    def gathered(self, tensor: Tensor, layout: Layout) -> Tensor:
        """Return the whole of a tensor from its parts."""
        parts = self.collectives.all_gather(tensor, self.size, self.group)
        dim, shape = layout.dim, tensor.shape
        pieces = parts.view(
            self.size, *shape[:dim], layout.outer, shape[dim] // layout.outer, *shape[dim + 1 :]
        )
        return pieces.movedim(0, dim + 1).flatten(dim, dim + 2)

    def scattered(self, tensor: Tensor, layout: Layout) -> Tensor:
        """Return this rank's part of the sum over ranks."""
        pieces = self._pieces(tensor, layout).movedim(layout.dim + 1, 0).contiguous()
        part = self.collectives.reduce_scatter(pieces, self.group)
        return part.flatten(layout.dim, layout.dim + 1)

    def exchanged(self, tensor: Tensor, source: Layout, target: Layout) -> Tensor:
        """Return this rank's part in another layout, from a part in one."""
        if source.outer > 1 or target.outer > 1:
            return self.part(self.gathered(tensor, source), target)
        pieces = self._pieces(tensor, target).movedim(target.dim + 1, 0).contiguous()
        received = self.collectives.all_to_all(pieces, self.group)
        parts = received.flatten(target.dim + 1, target.dim + 2)
        return parts.movedim(0, source.dim).flatten(source.dim, source.dim + 1)

    def part(self, tensor: Tensor, layout: Layout) -> Tensor:
        """Return this rank's part of a whole tensor."""
        if layout.outer == 1:
            size = tensor.shape[layout.dim] // self.size
            return tensor.narrow(layout.dim, self.rank * size, size)
        pieces = self._pieces(tensor, layout).select(layout.dim + 1, self.rank)
        return pieces.flatten(layout.dim, layout.dim + 1)

    def _pieces(self, tensor: Tensor, layout: Layout) -> Tensor:
        """Take the split dim apart into outer pieces, ranks, and what a rank has of each."""
        dim, shape = layout.dim, tensor.shape
        size = shape[dim] // layout.outer // self.size
        return tensor.reshape(*shape[:dim], layout.outer, self.size, size, *shape[dim + 1 :])


class SplitTensor(Tensor):
    """A tensor in a layout over ranks; it has the shape of the whole."""

    local: Tensor
    layout_over_ranks: Layout
    ranks: Ranks
    run: ClassVar[Callable[[Function, Args, Kwargs], Tree]]
    """How an op is run; ``split_ops`` says so."""
    functions: ClassVar[dict[Function, Callable[..., Tree]]] = {}
    """Functions of torch that have a way of their own above autograd."""

    @staticmethod
    def __new__(
        cls: type["SplitTensor"], local: Tensor, layout: Layout, ranks: Ranks
    ) -> "SplitTensor":
        """Wrap what this rank holds."""
        shape, strides = list(local.shape), list(local.stride())
        if layout.is_shard:
            inner = strides[layout.dim]
            strides = [s * ranks.size if s > inner else s for s in strides]
            shape[layout.dim] *= ranks.size
        made: SplitTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=local.dtype, device=local.device
        )
        held = (
            local.detach() if local.requires_grad or not isinstance(local, SplitTensor) else local
        )
        made.local, made.layout_over_ranks, made.ranks = held, layout, ranks
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SplitTensor({tuple(self.shape)}, {self.layout_over_ranks})"

    @classmethod
    def __torch_function__(
        cls, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        own: Function = cls.functions.get(func, func)
        with torch._C.DisableTorchFunctionSubclass():
            return own(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        with torch._C.DisableTorchFunctionSubclass():  # sizes are read without a detour
            return cls.run(func, args, kwargs or {})


def is_over(tensor: Tree, ranks: Ranks) -> TypeGuard[SplitTensor]:
    """Whether something is a tensor that is split over some ranks, whatever it is over others."""
    return isinstance(tensor, SplitTensor) and tensor.ranks.level == ranks.level


def layout_of(tensor: Tensor, ranks: Ranks) -> Layout:
    """Return the layout of a tensor over some ranks; one that is not split is whole on each."""
    if isinstance(tensor, Promise):
        return layout_of(tensor.sketch, ranks)
    if is_over(tensor, ranks):
        return tensor.layout_over_ranks
    if isinstance(tensor, SplitTensor) and tensor.ranks.level > ranks.level:
        return layout_of(tensor.local, ranks)
    return REPLICATE


def layout_inside(tensor: Tensor) -> Layout:
    """Return how what a rank has of a tensor is split in turn."""
    local = tensor.local if isinstance(tensor, SplitTensor) else tensor
    return local.layout_over_ranks if isinstance(local, SplitTensor) else REPLICATE


def _converted(tensor: Tensor, target: Layout, ranks: Ranks) -> Tensor:
    """Bring a tensor to another layout, outside autograd."""
    if isinstance(tensor, SplitTensor) and tensor.ranks.level > ranks.level:
        part = _converted(tensor.local, target, ranks)
        return SplitTensor(part, tensor.layout_over_ranks, tensor.ranks)
    source = layout_of(tensor, ranks)
    local = tensor.local if is_over(tensor, ranks) else tensor
    if isinstance(local, SplitTensor):
        within = local.layout_over_ranks, local.ranks
        before, after = (_in_a_part(each, *within) for each in (source, target))
        local = SplitTensor(_moved(local.local, before, after, ranks), *within)
    else:
        local = _moved(local, source, target, ranks)
    return local if target == REPLICATE else SplitTensor(local, target, ranks)


def _in_a_part(layout: Layout, inside: Layout, within: Ranks) -> Layout:
    """Return a layout as it is of one of the parts that each rank's tensor is split into.

    Raises:
        SplitError: The parts are strewn over it.
    """
    if not (layout.is_shard and inside.is_shard and layout.dim == inside.dim):
        return layout
    if layout.outer % (inside.outer * within.size):
        raise SplitError(
            f"dim {layout.dim} is split over ranks inside those that exchange it: its parts would "
            "not lie in order"
        )
    return Layout(layout.kind, layout.dim, layout.outer // within.size)


def _moved(local: Tensor, source: Layout, target: Layout, ranks: Ranks) -> Tensor:
    """Bring what a rank holds to another layout."""
    if source == PARTIAL and target != PARTIAL:
        local = ranks.scattered(local, target) if target.is_shard else ranks.reduced(local)
    elif source.is_shard and target.is_shard and source != target:
        local = ranks.exchanged(local, source, target)
    elif source.is_shard and not target.is_shard:
        local = ranks.gathered(local, source)
    elif target.is_shard and not source.is_shard:
        # A view would keep the whole tensor for as long as the part.
        local = ranks.part(local, target).clone(memory_format=torch.contiguous_format)
    else:
        local = alias_of(local)
    if target == PARTIAL and source != PARTIAL:
        local = local if ranks.rank == 0 else torch.zeros_like(local)
    return local


class _Change(torch.autograd.Function):
    """A change of layout; the gradient comes back in the layout that it must have."""

    @staticmethod
    def forward(ctx: Tree, tensor: Tensor, target: Layout, ranks: Ranks, back: Layout) -> Tensor:
        ctx.back, ctx.ranks = back, ranks
        return _converted(tensor, target, ranks)

    @staticmethod
    def backward(ctx: Tree, grad: Tensor) -> tuple[Tensor, None, None, None]:
        refuse_unread([grad])
        if layout_of(grad, ctx.ranks) != ctx.back:
            grad = _converted(grad, ctx.back, ctx.ranks)
        if ctx.back == PARTIAL:  # of a plain parameter
            assert isinstance(grad, SplitTensor)
            grad = grad.local
        return grad, None, None, None


def changed(
    tensor: Tensor, target: Layout, ranks: Ranks, *, gradient: Layout | None = None
) -> Tensor:
    """Bring a tensor to a layout; nothing happens where it has it.

    Args:
        tensor: A split or a plain tensor.
        target: Its new layout.
        ranks: The ranks of the axis.
        gradient: Layout in which its gradient goes back, PARTIAL for this rank's summand as a
            plain tensor; None for that of the tensor, where the gradient of a sum is whole.

    Raises:
        SplitError: It is not there yet, and will lie otherwise.
    """
    source = layout_of(tensor, ranks)
    if source == target and gradient is None:
        return tensor
    if isinstance(tensor, Promise):
        raise SplitError(f"{tensor!r} would have to be {target} before it is made, not {source}")
    back = gradient or (source if source.is_shard else REPLICATE)
    made: Tensor = _Change.apply(tensor, target, ranks, back)  # type: ignore[no-untyped-call]
    return made


class _Multiplied(torch.autograd.Function):
    """The same values, with a gradient that is multiplied."""

    @staticmethod
    def forward(ctx: Tree, tensor: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Tree, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def counted_in_mean(tensor: Tensor, ranks: Ranks) -> Tensor:
    """Return a parameter whose gradients are summands, of which the mean over ranks is taken."""
    made: Tensor = _Multiplied.apply(tensor, ranks.size)  # type: ignore[no-untyped-call]
    return made


class _Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Tree, local: Tensor, layout: Layout, ranks: Ranks) -> Tensor:
        ctx.layout, ctx.ranks = layout, ranks
        return SplitTensor(local, layout, ranks)

    @staticmethod
    def backward(ctx: Tree, grad: Tensor) -> tuple[Tensor, None, None]:
        refuse_unread([grad])
        # Each summand of a sum over ranks has the gradient of the sum.
        back = ctx.layout if ctx.layout.is_shard else REPLICATE
        if layout_of(grad, ctx.ranks) != back:
            grad = _converted(grad, back, ctx.ranks)
        return grad.local if is_over(grad, ctx.ranks) else grad, None, None


def wrapped(local: Tensor, layout: Layout, ranks: Ranks) -> Tensor:
    """Take a local tensor for a part; its gradient is the part of the gradient."""
    made: Tensor = _Wrap.apply(local, layout, ranks)  # type: ignore[no-untyped-call]
    return made


class _Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Tree, tensor: SplitTensor) -> Tensor:
        ctx.layout, ctx.ranks = tensor.layout_over_ranks, tensor.ranks
        return alias_of(tensor.local)  # zero-bubble schedules detach what stages return in place

    @staticmethod
    def backward(ctx: Tree, grad: Tensor) -> Tensor:
        is_sum = ctx.layout == REPLICATE_PARTIAL_GRAD
        return SplitTensor(grad, PARTIAL if is_sum else ctx.layout, ctx.ranks)


def unwrapped(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor; its gradient is that of the part."""
    if not isinstance(tensor, SplitTensor):
        return tensor
    made: Tensor = _Unwrap.apply(tensor)  # type: ignore[no-untyped-call]
    return made
