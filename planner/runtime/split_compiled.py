"""Split blocks that torch.compile makes fewer kernels of.

torch.compile looks into no code that runs on split tensors: to it such a block is one function of
plain tensors, what this rank holds of the block's inputs, parameters and buffers. The graph of ops
is drawn by running that function, so that its layouts, collectives and rules are those of a block
that is not compiled. Python of a block runs when its graph is drawn, and not again.

Blocks of one kind share a graph: their code computes the same on the same parts.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from .compiled import allow_variants
from .layout import Layout
from .module_edge import BlockShardings
from .recompute import checkpoint_options
from .split_part import SplitPart
from .split_tensor import Ranks, SplitTensor, unwrapped, wrapped
from .traced_collectives import TracedCollectives
from .trees import Tree

Layouts: TypeAlias = tuple[tuple[Layout, Ranks], ...]
"""How a tensor is split, from the outermost ranks to the innermost; empty for one that is not."""


_Run: TypeAlias = Callable[..., tuple[Tensor, ...]]

_RUNS: list[_Run] = []
"""What runs each kind of block in this process; a graph knows it by its number."""

_MODES = 3
"""Recomputations under which a kind may run."""


@dataclass(frozen=True, slots=True)
class _Tensors:
    """A tree whose tensors are apart from it."""

    form: TreeSpec
    others: tuple[object, ...]
    """Leaves that are no tensors, None in the places of those that are."""
    places: tuple[int, ...]
    layouts: tuple[Layouts, ...]
    """Of each tensor."""

    def whole(self, held: Sequence[Tensor]) -> Tree:
        """Put the tree together again from what this rank holds of its tensors."""
        leaves = list(self.others)
        for place, layouts, tensor in zip(self.places, self.layouts, held, strict=True):
            leaves[place] = _covered(tensor, layouts)
        return tree_unflatten(leaves, self.form)


@dataclass(frozen=True, slots=True)
class _Call:
    """What the code of a block sees besides the values of tensors."""

    inputs: _Tensors
    parameters: tuple[str, ...]
    """Names of parameters and buffers."""
    shown: tuple[tuple[str, str, Layouts], ...]
    """Modules and names of parameters that the block's own edge shows in other layouts."""
    is_training: bool


class _Kind:
    """Blocks that compute alike, one of which stands for all."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.forward: Callable[..., Tree] = block.forward  # as it is before it is compiled
        self.calls: list[_Call] = []
        self.outputs: dict[int, _Tensors] = {}  # by the position of the call
        self.number = len(_RUNS)
        run: _Run = torch.compiler.allow_in_graph(self.run)  # type: ignore[no-untyped-call]
        _RUNS.append(run)

    def run(self, call: int, *held: Tensor) -> tuple[Tensor, ...]:
        """Run the block as it is written, on what this rank holds; the same of its outputs."""
        about = self.calls[call]
        inputs, parameters, shown = _cut(held, about.inputs.places, about.parameters)
        args, kwargs = about.inputs.whole(inputs)
        inside = _Inside(self.block, self.forward, about, shown)
        named = {f"block.{n}": t for n, t in zip(about.parameters, parameters, strict=True)}
        output = torch.func.functional_call(inside, named, args, kwargs)
        self.outputs[call], tensors = _taken_apart(output)
        return tuple(tensors)


class _Inside(nn.Module):
    """A block inside the call that a graph is drawn of, without what lies around its forward."""

    def __init__(
        self, block: nn.Module, inner: Callable[..., Tree], about: _Call, shown: Sequence[Tensor]
    ) -> None:
        super().__init__()
        self.block, self.inner, self.about, self.shown = block, inner, about, shown

    def forward(self, *args: Tree, **kwargs: Tree) -> Tree:
        """Run it."""
        outside = []
        for (path, name, layouts), held in zip(self.about.shown, self.shown, strict=True):
            attributes = self.block.get_submodule(path).__dict__
            outside.append((attributes, name, attributes[name]))
            attributes[name] = _covered(held, layouts)
        try:
            return self.inner(*args, **kwargs)
        finally:
            for attributes, name, tensor in outside:
                attributes[name] = tensor


def _called(kind: int, call: int, mode: str, *held: Tensor) -> tuple[Tensor, ...]:
    """What torch.compile sees of a block; numbers and words tell graphs apart."""
    run = _RUNS[kind]
    if mode == "none":
        return run(call, *held)
    outputs: tuple[Tensor, ...] = checkpoint(
        run, call, *held, use_reentrant=False, **checkpoint_options(mode)
    )
    return outputs


def compile_split_blocks(
    part: SplitPart, axes: Sequence[BlockShardings], modes: Sequence[str] = ()
) -> None:
    """Compile the forward of each block, with what of it backward computes again.

    Args:
        part: Has the blocks, split already.
        axes: How modules of blocks run over each axis: blocks named together are alike.
        modes: "none", "selective" or "full" for each of them; empty for none at all.

    Raises:
        ValueError: An unknown word.
    """
    Ranks.collectives = TracedCollectives()
    kinds: dict[tuple[object, ...], _Kind] = {}
    for index, (_, block) in enumerate(part.block_items()):
        position = part.first_block + index
        said = tuple(_group_of(axis, position) for axis in axes)
        key = said if any(each is not None for each in said) else (position,)
        if key not in kinds:
            kinds[key] = _Kind(block)
        block.forward = _Forward(block, kinds[key], modes[index] if modes else "none")
    allow_variants(_MODES * len(_RUNS))


@contextmanager
def graph_drawn(block: nn.Module) -> Iterator[None]:
    """Let a split block run by a graph whose ops are run as they are, for a trial.

    Args:
        block: Of a model on the meta device.
    """
    allow_variants(_MODES * len(_RUNS))
    own, collectives = block.forward, Ranks.collectives
    Ranks.collectives = TracedCollectives()
    block.forward = _Forward(block, _Kind(block), "none", backend="aot_eager")
    try:
        yield
    finally:
        block.forward, Ranks.collectives = own, collectives


def _group_of(axis: BlockShardings, position: int) -> int | None:
    return next((i for i, (blocks, _) in enumerate(axis) if position in blocks), None)


class _Forward:
    """The forward of a block, by the graph of its kind."""

    def __init__(
        self, block: nn.Module, kind: _Kind, mode: str, *, backend: str = "inductor"
    ) -> None:
        checkpoint_options(mode)
        self.block, self.kind, self.mode = block, kind, mode
        self.compiled = torch.compile(_called, fullgraph=True, dynamic=False, backend=backend)
        named = [*block.named_parameters(), *block.named_buffers()]
        self.names = tuple(name for name, _ in named)
        holders = [
            (block.get_submodule(n.rpartition(".")[0]), n.rpartition(".")[2]) for n in self.names
        ]
        # FSDP2 puts other tensors in these places.
        self.places = [
            (each._parameters if name in each._parameters else each._buffers, name)
            for each, name in holders
        ]
        modules = [(path, each) for path, each in block.named_modules() if each._parameters]
        self.edges = [(path, each.__dict__, each._parameters.keys()) for path, each in modules]

    def __call__(self, *args: Tree, **kwargs: Tree) -> Tree:
        inputs, held = _taken_apart((args, kwargs))
        held += [_local(own[name]) for own, name in self.places]
        shown = []
        for path, attributes, names in self.edges:
            for name in names & attributes.keys():
                layouts, local = _uncovered(attributes[name])
                shown.append((path, name, layouts))
                held.append(local)
        call = _Call(inputs, self.names, tuple(shown), self.block.training)
        calls = self.kind.calls
        if call not in calls:
            calls.append(call)
        position = calls.index(call)
        outputs = self.compiled(self.kind.number, position, self.mode, *held)
        return self.kind.outputs[position].whole(outputs)


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _cut(held: Sequence[Tensor], *counts: Sequence[object]) -> list[Sequence[Tensor]]:
    """Cut tensors into as many as each of ``counts`` has, and the rest."""
    ends = [sum(len(each) for each in counts[: i + 1]) for i in range(len(counts))]
    return [held[a:b] for a, b in zip([0, *ends], [*ends, len(held)], strict=True)]


def _taken_apart(tree: Tree) -> tuple[_Tensors, list[Tensor]]:
    """Take the tensors out of a tree, of split ones what this rank holds."""
    leaves, form = tree_flatten(tree)
    places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    found = [_uncovered(leaves[place]) for place in places]
    others = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    layouts = tuple(layouts for layouts, _ in found)
    return _Tensors(form, others, places, layouts), [local for _, local in found]


def _uncovered(tensor: Tensor) -> tuple[Layouts, Tensor]:
    """Return how a tensor is split, and what this rank holds of it."""
    layouts = []
    while isinstance(tensor, SplitTensor):
        layouts.append((tensor.layout_over_ranks, tensor.ranks))
        tensor = unwrapped(tensor)
    return tuple(layouts), tensor


def _covered(tensor: Tensor, layouts: Layouts) -> Tensor:
    """Take what this rank holds for its part of a split tensor."""
    for layout, ranks in reversed(layouts):
        tensor = wrapped(tensor, layout, ranks)
    return tensor
