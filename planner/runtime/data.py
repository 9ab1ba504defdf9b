"""The microbatches of a step."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from .model import UserModel
from .processes import RankError, RunError
from .trees import Microbatch, Tree, tensors_of


def drawn_microbatches(
    user: UserModel, seed: int, step: int, samples: Iterable[int], microbatch_size: int
) -> list[Microbatch]:
    """Draw microbatches, the same in every layout of one global batch size.

    Each sample is a pure function of seed, step and position: one of ``example_batch(1)`` under a
    seed of its own, so that a rank draws no others.

    Args:
        user: Offers ``example_batch``.
        seed: Seed of the whole training run.
        step: Steps before this one.
        samples: Positions in the global batch that this process reads.
        microbatch_size: Samples per microbatch.
    """
    drawn = []
    for position in samples:
        with torch.random.fork_rng(devices=[]):
            # Where CUDA never starts, torch.manual_seed notes the stack for it: half a millisecond.
            seeds: Any = torch if torch.cuda.is_initialized() else torch.default_generator  # type: ignore[no-untyped-call]
            seeds.manual_seed(mixed_seed(seed, step, position))
            drawn.append(checked(user.example_batch(1), 1, "example_batch(1)"))
    shapes = {tuple(tensor.shape for tensor in tensors_of(sample)) for sample in drawn}
    if len(shapes) > 1:
        raise RunError(f"example_batch(1) returns tensors of changing shapes: {shapes}")
    return split_batch(joined_batch(drawn), microbatch_size)


def checked(batch: Tree, size: int | None, source: str) -> Microbatch:
    """Return inputs and targets of a batch; a dict is the arguments of a model with its own loss.

    Raises:
        RankError: Its tensors have not ``size`` samples, or where that is None, not equally many.
    """
    inputs, targets = (batch, None) if isinstance(batch, Mapping) else batch
    inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs  # of collators, too
    for tensor in tensors_of((inputs, targets)):
        size = len(tensor) if size is None else size
        if tensor.shape[:1] != (size,):
            raise RankError(
                f"{source} gave a tensor of shape {tuple(tensor.shape)}: its first dim must be "
                f"the samples, {size} here (a DataLoader needs drop_last=True)"
            )
    return inputs, targets


def split_batch(batch: Tree, size: int) -> list[Microbatch]:
    """Split a batch into microbatches of ``size`` samples.

    Raises:
        RankError: It does not divide into them.
    """
    batch = checked(batch, None, "the training loop")
    count, rest = divmod(len(tensors_of(batch)[0]), size)
    if rest:
        raise RankError(f"{count * size + rest} samples are no whole microbatches of {size}")

    def piece(index: int) -> Microbatch:
        cut: Microbatch = tree_map_only(Tensor, lambda t: t[index * size :][:size], batch)
        return cut

    return [piece(index) for index in range(count)]


def joined_batch(microbatches: Iterable[Microbatch]) -> Microbatch:
    """Return one batch of all microbatches."""

    def joined(*leaves: Tree) -> Tree:
        return torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0]

    inputs, targets = tree_map(joined, *microbatches)
    return inputs, targets


def mixed_seed(*numbers: int) -> int:
    """Mix numbers into one seed (any order-dependent mix without collisions nearby will do)."""
    mixed = 0
    for number in numbers:
        mixed = (mixed * 1_000_003 + number + 1) % 2**63
    return mixed
