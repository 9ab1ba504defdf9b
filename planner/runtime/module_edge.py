"""What happens where a split module begins and ends."""

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .layout import PARTIAL, REPLICATE, REPLICATE_PARTIAL_GRAD, Layout, SplitAxis, shard
from .split_tensor import (
    Ranks,
    SplitTensor,
    changed,
    counted_in_mean,
    layout_of,
    unwrapped,
    wrapped,
)
from .streams import first_tensor, stream_of, with_stream, with_tensors
from .trees import Args, Kwargs, Tree, tensors_of


@dataclass(frozen=True, slots=True)
class ModuleSharding:
    """How one module that owns parameters runs; layouts are spelled as torch spells them."""

    module: str
    """Path in its block, or in the model for modules outside the blocks."""
    style: str
    """"column", "row", "inner" (whole inputs, an output that is a sum over ranks),
    "vocab_embedding", "replicate", "on_part" (whole parameters on a part of the input, so that
    their gradients are sums over ranks) or "experts" (some of its experts on each rank)."""
    split: tuple[tuple[str, int, int], ...] = ()
    """Names of the parameters that are split, the dim of each, and how many equal projections lie
    side by side along it; the others are whole."""
    input_layout: str = "Replicate"
    """Layout that the first input must have."""
    output_layout: str = "Replicate"
    """Layout that the output leaves with."""


BlockShardings: TypeAlias = Sequence[tuple[Sequence[int], Sequence[ModuleSharding]]]
"""Positions of blocks that compute alike, and how modules of each of them run."""


@dataclass(frozen=True, slots=True)
class AxisShardings:
    """How modules run over one axis."""

    axis: SplitAxis
    """The axis."""
    sequence_dim: int | None
    """Dim of the stream that is split inside blocks (over cp everywhere), None for none."""
    blocks: BlockShardings = ()
    """What holds for blocks."""
    outer: Sequence[ModuleSharding] = ()
    """What holds for modules outside the blocks."""

    def of_block(self, position: int) -> Sequence[ModuleSharding]:
        """What holds for a block."""
        return next((modules for blocks, modules in self.blocks if position in blocks), ())


def placement(layout: str, ndim: int) -> Layout:
    """Read "Replicate" or "Shard(dim)", of a tensor with so many dims.

    Raises:
        ValueError: Another text.
    """
    if layout == "Replicate":
        return REPLICATE
    if layout.startswith("Shard(") and layout.endswith(")"):
        dim, _, outer = layout[len("Shard(") : -1].partition("/")
        return shard(int(dim) % max(ndim, 1), int(outer or 1))
    raise ValueError(f"{layout!r} is no layout: write Replicate or Shard(dim)")


@dataclass(slots=True)
class Stream:
    """What flows between blocks, as far as it is known."""

    before: int = 1
    """Product of the dims before the one that is split."""
    shared: list[weakref.ref[Tensor]] = field(default_factory=list)
    """Tensors that keep what modules of the running block share of them in another layout."""

    def forget(self, *_: Tree) -> None:
        """Let go of it when the block has run: its input outlives it where it runs again."""
        for each in self.shared:
            if (tensor := each()) is not None:
                tensor.__dict__.pop("_in_layout", None)
        self.shared.clear()


@dataclass(slots=True)
class ModuleEdge:
    """Layout changes where a module begins and ends."""

    sharding: ModuleSharding
    axis: SplitAxis
    ranks: Ranks
    layouts: dict[str, Layout]
    """Layout of each of its parameters; "partial" for whole ones with sums for gradients."""
    stream: Stream
    """What flows between blocks."""

    def enter(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Bring the first input into its layout, and show the parameters as they are split."""
        self._cover(module)
        if self.sharding.style == "vocab_embedding":
            return args, kwargs
        if self.sharding.style == "inner":
            each = functools.partial(self._shared, target=REPLICATE_PARTIAL_GRAD)
            return _with_all(args, kwargs, each)
        if self.sharding.style == "replicate":  # all inputs whole
            if not any(isinstance(t, SplitTensor) for t in tensors_of((args, kwargs))):
                return args, kwargs
            whole = functools.partial(self._shared, target=REPLICATE)
            return _with_all(args, kwargs, whole)
        first = stream_of(args, kwargs)
        if self.sharding.style == "column":
            return with_stream(args, kwargs, self._shared(first, REPLICATE_PARTIAL_GRAD))
        target = self._in_pieces(first, self.sharding.input_layout)
        return with_stream(args, kwargs, self._shared(first, target))

    def _cover(self, module: nn.Module) -> None:
        for name, layout in self.layouts.items():
            holder, last = holder_of(module, name)
            # Over cp what is shown may be what the axis inside shows.
            parameter: Tensor | None = holder.__dict__.get(last, holder._parameters[last])
            assert parameter is not None
            if layout.is_shard:
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                shown = wrapped(local, layout, self.ranks)
            elif self.sharding.style == "on_part":
                if self.axis.is_context:
                    parameter = counted_in_mean(parameter, self.ranks)
                shown = changed(parameter, REPLICATE_PARTIAL_GRAD, self.ranks, gradient=PARTIAL)
            elif self.sharding.split:
                # It is added to a sum over ranks by one of them.
                shown = changed(parameter, REPLICATE_PARTIAL_GRAD, self.ranks, gradient=REPLICATE)
            else:
                continue
            holder.__dict__[last] = shown

    def uncover(self, module: nn.Module, _: Args, __: Tree) -> None:
        """Leave the parameters as they were."""
        for name in self.layouts:
            holder, last = holder_of(module, name)
            holder.__dict__.pop(last, None)

    def _shared(self, x: Tensor, target: Layout) -> Tensor:
        """Return a tensor in a layout, one for all modules that read it.

        So q, k and v (gate and up) share one collective forward and one backward.
        """
        is_moved = x.is_floating_point() or isinstance(x, SplitTensor) or target.is_shard
        if layout_of(x, self.ranks) == target or not is_moved:
            return x
        axis = (self.ranks.level, self.ranks.size)
        key = (x._version, target, axis, torch.is_grad_enabled())
        if "_in_layout" not in x.__dict__:
            x.__dict__["_in_layout"] = {}
            self.stream.shared.append(weakref.ref(x))
        kept: dict[object, Tensor] = x.__dict__["_in_layout"]
        if key not in kept:
            kept[key] = changed(x, target, self.ranks)
        return kept[key]

    def _in_pieces(self, x: Tensor, layout: str) -> Layout:
        """Read a layout; a split dim lies in the pieces in which it does, or as the stream does."""
        target, source = placement(layout, x.ndim), layout_of(x, self.ranks)
        if target.is_shard and source.is_shard and target.dim == source.dim:
            return Layout(target.kind, target.dim, source.outer)
        joins_dims = self.axis.is_context or self.axis.experts > 1
        if joins_dims and target == shard(0) and x.ndim == 2:  # samples x sequence
            return shard(0, self.stream.before)
        return target

    def split(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Return this rank's part of all tensors among arguments, which are rows."""

        def part(x: Tensor) -> Tensor:
            return unwrapped(self._shared(x, self._in_pieces(x, self.sharding.input_layout)))

        return _with_all(args, kwargs, part)

    def wrapped(self, rows: Tensor) -> Tensor:
        """Take rows for this rank's part of those of all."""
        return wrapped(rows, self._in_pieces(rows, self.sharding.input_layout), self.ranks)

    def left(self, rows: Tensor) -> Tensor:
        """Bring rows of all ranks into the layout of the output."""
        return changed(rows, self._in_pieces(rows, self.sharding.output_layout), self.ranks)

    def leave(self, _: nn.Module, __: Args, output: Tree) -> Tree:
        """Bring the output into its layout."""
        first = first_tensor(output)
        target = self._in_pieces(first, self.sharding.output_layout)
        made = changed(first, target, self.ranks)
        return output if made is first else with_tensors(output, {0: made})


def holder_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that registers a parameter, with its name there."""
    path, _, last = name.rpartition(".")
    return module.get_submodule(path), last


def _with_all(
    args: Args, kwargs: Kwargs, change: Callable[[Tensor], Tensor]
) -> tuple[Args, Kwargs]:
    """Change all tensors among arguments."""
    new = {index: change(each) for index, each in enumerate(tensors_of((args, kwargs)))}
    changed_args, changed_kwargs = with_tensors((args, kwargs), new)
    return changed_args, changed_kwargs
