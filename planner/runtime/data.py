"""The microbatches of a step."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from .model import UserModel
from .processes import RankError, RunError
from .trees import Microbatch, Tree, tensors_of


@dataclass(slots=True, kw_only=True)
class Data:
    """What data-parallel ranks read, the same for every layout of one global batch size.

    Each sample is a pure function of seed, step and position: one of ``example_batch(1)`` under a
    seed of its own, so that a rank draws no others.
    """

    user: UserModel
    """Offers ``example_batch``."""
    seed: int
    """Seed of the whole training run."""
    ranks: Sequence[int]
    """The data-parallel ranks whose samples this process reads: one, or all (the reference)."""
    world_size: int
    """All data-parallel ranks."""
    microbatch_size: int
    """Samples per microbatch."""
    num_microbatches: int
    """Batches per step and rank."""

    def start(self, step: int, checkpoint: Path | None) -> None:
        """Begin where training goes on, after ``step`` steps.

        Raises:
            RunError: The model file has data that the script has no code for.
        """
        if self.user.function("data_loader") is not None:
            raise RunError(
                "the model file had no data_loader when this script was written: run plan again"
            )

    def state(self) -> dict[str, bytes]:
        """Return what a checkpoint keeps of the data: nothing of what is drawn."""
        return {}

    def microbatches(self, step: int) -> list[Microbatch]:
        """Return this process's microbatches of a step, on the CPU."""
        size = self.microbatch_size * self.num_microbatches
        samples = [self._sample(step, rank * size + i) for rank in self.ranks for i in range(size)]
        shapes = {tuple(tensor.shape for tensor in tensors_of(sample)) for sample in samples}
        if len(shapes) > 1:
            raise RunError(f"example_batch(1) returns tensors of changing shapes: {shapes}")
        return split_batch(joined_batch(samples), self.microbatch_size)

    def _sample(self, step: int, position: int) -> Microbatch:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(mixed_seed(self.seed, step, position))
            return checked(self.user.example_batch(1), 1, "example_batch(1)")


def checked(batch: Tree, size: int | None, source: str) -> Microbatch:
    """Return inputs and targets of a batch; a dict is the arguments of a model with its own loss.

    Args:
        batch: As a loader or ``example_batch`` gives it.
        size: Samples that it must have, None for those of its first tensor.
        source: Where it is from, for the message.

    Raises:
        RankError: Its tensors are not of so many samples.
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
    firsts = [size * i for i in range(count)]
    return [tree_map_only(Tensor, lambda t, i=i: t[i : i + size], batch) for i in firsts]


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
