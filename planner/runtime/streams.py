"""The stream: the first tensor among a block's arguments, and what the last block returns."""

from collections.abc import Mapping

from torch import Tensor
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
