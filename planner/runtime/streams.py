"""The stream: the first tensor among a block's arguments, and what the last block returns."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from .trees import Args, Kwargs, Tree, tensors_of


def stream_of(args: Args, kwargs: Kwargs) -> Tensor:
    """Return the stream among a block's arguments: its first tensor."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value
    raise TypeError("a block was called without a tensor: it cannot be cut into stages here")


def with_stream(args: Args, kwargs: Kwargs, stream: Tensor) -> tuple[Args, Kwargs]:
    """Put the stream in the place of a block's first tensor argument."""
    old = stream_of(args, kwargs)
    new_args = tuple(stream if value is old else value for value in args)
    return new_args, {k: stream if v is old else v for k, v in kwargs.items()}


def first_tensor(output: Tree) -> Tensor:
    """Return the stream in what the last block returns."""
    return output if isinstance(output, Tensor) else tensors_of(output)[0]


def with_tensors(tree: Tree, new: Mapping[int, Tensor]) -> Tree:
    """Put tensors in the place of some of a tree's tensors, by their position among these."""
    leaves, structure = tree_flatten(tree)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for index, tensor in new.items():
        leaves[places[index]] = tensor
    return tree_unflatten(leaves, structure)


@dataclass(frozen=True, slots=True)
class _Again:
    """Stands for a tensor that a module is given once more."""

    place: int
    """Where it is given first, among the leaves of the arguments."""


def name_again(_: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
    """Hand on each tensor once, for ``give_again`` behind what makes a new one of each.

    FSDP2 does, so that queries, keys and values would be three tensors where a block has one.
    """
    leaves, form = tree_flatten((args, kwargs))
    first: dict[int, int] = {}
    places = [first.setdefault(id(leaf), place) for place, leaf in enumerate(leaves)]
    again = [p for p, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and places[p] != p]
    for place in again:
        leaves[place] = _Again(places[place])
    return _pair(tree_unflatten(leaves, form)) if again else None


def give_again(_: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
    """Give each tensor to a module as often as it is named."""
    leaves, form = tree_flatten((args, kwargs))
    if not any(isinstance(leaf, _Again) for leaf in leaves):
        return None
    given = [leaves[leaf.place] if isinstance(leaf, _Again) else leaf for leaf in leaves]
    return _pair(tree_unflatten(given, form))


def _pair(tree: Tree) -> tuple[Args, Kwargs]:
    args, kwargs = tree
    return args, kwargs
