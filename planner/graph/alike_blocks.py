"""Blocks that the first of their kind tells of, so that a look at a model need not run them all."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn

from planner.graph.operator_graph import OperatorGraph, Phase
from planner.graph.torch_private import has_hooks, modes_disabled, tree_leaves, tree_map
from planner.runtime.trees import Tree, alias_of, tensors_of


def kinds_of_blocks(graph: OperatorGraph) -> list[str | None]:
    """Kind of each block: those of a kind run the same ops, and code outside reads one tensor.

    None where it reads more, or nothing, of what a block makes.
    """
    blocks = [unit for unit in graph.units if unit.block is not None]
    inside = {op: unit.index for unit in blocks for op in unit.forward_ops[: unit.num_block_ops]}
    made_by = {value: at for op, at in inside.items() for value in graph.nodes[op].outputs}
    read: dict[int, set[int]] = {unit.index: set() for unit in blocks}
    for op in graph.nodes:
        for value in op.inputs if op.phase is Phase.FORWARD else ():
            maker = made_by.get(value)
            if maker is not None and maker != inside.get(op.id):
                read[maker].add(value)
    return [unit.structure if len(read[unit.index]) == 1 else None for unit in blocks]


@contextmanager
def alike_blocks_skipped(
    blocks: Sequence[str], kinds: Sequence[Hashable], model: nn.Module
) -> Iterator[None]:
    """Let blocks return what the first of their kind returned.

    It tells of them where it changes no argument and returns one new tensor, beside arguments; a
    block runs where modules in it have hooks.

    Args:
        blocks: Paths of the blocks in execution order.
        kinds: Kind of each of them, None for one that runs in any case.
        model: What runs meanwhile, on the meta device.
    """
    first = _FirstOfKind()
    modules = [
        (model.get_submodule(path), kind)
        for path, kind in zip(blocks, kinds, strict=True)
        if kind is not None
    ]
    chosen = [(module, kind) for module, kind in modules if "forward" not in vars(module)]
    for module, kind in chosen:
        module.forward = partial(first.called, module, kind, module.forward)
    try:
        yield
    finally:
        for module, _ in chosen:
            del module.forward


@dataclass(frozen=True, slots=True)
class _Given:
    """One of the tensors that a block gets."""

    place: int


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor that a block makes."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool


class _FirstOfKind:
    """What the first block of each kind returned."""

    def __init__(self) -> None:
        self._returned: dict[Hashable, Tree] = {}

    def called(
        self,
        block: nn.Module,
        kind: Hashable,
        forward: Callable[..., Tree],
        *args: Tree,
        **kwargs: Tree,
    ) -> Tree:
        """Stand for the forward of a block."""
        if any(has_hooks(module) for module in islice(block.modules(), 1, None)):
            return forward(*args, **kwargs)
        given = tensors_of((args, kwargs))
        looks = [(each.shape, each.dtype, each.requires_grad) for each in given]
        kind = kind, type(block), block.training, tuple(looks)
        if kind in self._returned:
            return tree_map(partial(_like, given), self._returned[kind])
        versions = [each._version for each in given]
        output = forward(*args, **kwargs)
        is_changed = versions != [each._version for each in given]
        places = {id(each): place for place, each in enumerate(given)}
        leaves = [leaf for leaf in tree_leaves(output) if leaf is not None]
        made = {id(leaf) for leaf in leaves} - places.keys()
        if len(made) == 1 and not is_changed and all(isinstance(leaf, Tensor) for leaf in leaves):
            self._returned[kind] = tree_map(partial(_told, places), output)
        return output


def _like(given: Sequence[Tensor], leaf: Tree) -> Tree:
    """What a block returns where the first of its kind returned this."""
    if isinstance(leaf, _Given):
        return given[leaf.place]
    if leaf is None:
        return None
    with modes_disabled():  # its data is not known
        empty = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        return alias_of(empty.requires_grad_(leaf.requires_grad))


def _told(places: dict[int, int], leaf: Tree) -> Tree:
    if not isinstance(leaf, Tensor):
        return leaf
    if id(leaf) in places:
        return _Given(places[id(leaf)])
    return _Made(leaf.shape, leaf.dtype, leaf.requires_grad)
