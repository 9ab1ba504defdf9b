"""Global batches, the seeds of a step, microbatches."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from .model import UserModel
from .processes import axis_names, data_parallel_rank
from .trees import Tree, cast_floats, tensors_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Global batches: a pure function of seed and step, whatever the layout."""

    model: UserModel
    """Offers ``example_batch``."""
    global_batch_size: int
    """Samples per step."""
    seed: int
    """Seed of the whole training run."""

    def global_batch(self, step: int) -> tuple[Tree, Tree]:
        """Return inputs and targets of all samples of a step, on the CPU."""
        return self.samples(step, range(self.global_batch_size))

    def samples(self, step: int, positions: Iterable[int]) -> tuple[Tree, Tree]:
        """Return inputs and targets of some samples of a step, on the CPU.

        Each is drawn under a seed of its own, so that a rank draws no others.

        Raises:
            ValueError: A tensor's first dim is not the number of samples, or samples differ in
                shape.
        """

        def joined(*leaves: Tree) -> Tree:
            return torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0]

        drawn = [self._sample(step, position) for position in positions]
        shapes = {tuple(tensor.shape for tensor in tensors_of(sample)) for sample in drawn}
        if len(shapes) > 1:
            raise ValueError(f"example_batch(1) returns tensors of changing shapes: {shapes}")
        inputs, targets = tree_map(joined, *drawn)
        return inputs, targets

    def _sample(self, step: int, position: int) -> tuple[Tree, Tree]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(mixed_seed(self.seed, step, position))
            sample = self.model.example_batch(1)
        for tensor in tensors_of(sample):
            if tensor.shape[:1] != (1,):
                raise ValueError(
                    f"example_batch(1) returned a tensor of shape {tuple(tensor.shape)}: its "
                    "first dim must be the number of samples"
                )
        return sample

    def of_rank(
        self, step: int, mesh: DeviceMesh, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tree, Tree]:
        """Return this rank's share of a step's batch; tp and pp ranks of a replica share it."""
        rank, size = data_parallel_rank(mesh)
        count = self.global_batch_size // size
        share = self.samples(step, range(rank * count, (rank + 1) * count))
        inputs, targets = tree_map_only(Tensor, lambda tensor: tensor.to(device), share)
        return cast_floats(inputs, dtype), targets

    @staticmethod
    def slice(batch: Tree, start: int, count: int) -> Tree:
        """Return ``count`` samples of every tensor of a batch."""
        return tree_map_only(Tensor, lambda tensor: tensor[start : start + count], batch)


def mixed_seed(*numbers: int) -> int:
    """Mix numbers into one seed (any order-dependent mix without collisions nearby will do)."""
    mixed = 0
    for number in numbers:
        mixed = (mixed * 1_000_003 + number + 1) % 2**63
    return mixed


def seed_step(seed: int, step: int, mesh: DeviceMesh) -> None:
    """Seed dropout for a step: alike on the tp ranks of one stage, different elsewhere."""
    rank, _ = data_parallel_rank(mesh)
    pp_rank = mesh["pp"].get_local_rank() if "pp" in axis_names(mesh) else 0
    torch.manual_seed(mixed_seed(seed, step, rank, pp_rank))


def split_microbatches(batch: Tree, count: int) -> Iterator[Tree]:
    """Yield ``count`` equal pieces of every tensor of a batch."""
    leaf = next(leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
    size = leaf.shape[0] // count
    for index in range(count):
        yield Batches.slice(batch, index * size, size)
