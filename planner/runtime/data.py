"""The microbatches of a step: of the model file's ``data_loader``, else synthetic ones."""

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from .model import UserModel
from .processes import RankError, RunError
from .trees import Function, Microbatch, Tree, tensors_of


@dataclass(slots=True, kw_only=True)
class Data:
    """What data-parallel ranks read, the same for every layout of one global batch size.

    Without a ``data_loader`` each sample is a pure function of seed, step and position: one of
    ``example_batch(1)`` under a seed of its own, so that a rank draws no others.
    """

    user: UserModel
    """Offers ``data_loader(rank, world_size, microbatch_size, seed)`` or ``example_batch``."""
    seed: int
    """Seed of the whole training run."""
    ranks: Sequence[int]
    """The data-parallel ranks whose samples this process reads: one, or all (the reference)."""
    world_size: int
    """All data-parallel ranks."""
    microbatch_size: int
    """Samples per microbatch."""
    num_microbatches: int
    """Microbatches per step and rank."""
    loaders: "list[_Loader]" = field(default_factory=list)

    def start(self, step: int, saved: Callable[[str], bytes | None]) -> None:
        """Open the loaders where training goes on.

        Args:
            step: Steps taken so far: what was read in them is passed over.
            saved: Gives back what ``state`` returned then, by name.
        """
        data_loader = self.user.function("data_loader")
        for rank in self.ranks if data_loader is not None else ():
            made = data_loader(rank, self.world_size, self.microbatch_size, self.seed)
            loader = _Loader(made, mixed_seed(self.seed, rank), self.microbatch_size)
            if (state := saved(self._name(rank))) is None:
                loader.skip(step * self.num_microbatches)
            else:
                loader.restore(pickle.loads(state))
            self.loaders.append(loader)

    def state(self) -> dict[str, bytes]:
        """Return where loaders are that have a state, by a name that differs between ranks."""
        ranked = zip(self.ranks, self.loaders, strict=False)
        states = {self._name(rank): loader.state() for rank, loader in ranked}
        return {name: pickle.dumps(state) for name, state in states.items() if state is not None}

    def _name(self, rank: int) -> str:
        return f"loader-{rank}-of-{self.world_size}-by-{self.microbatch_size}"

    def microbatches(self, step: int) -> list[Microbatch]:
        """Return this process's microbatches of a step, on the CPU."""
        count = range(self.num_microbatches)
        if self.loaders:
            return [loader.take() for loader in self.loaders for _ in count]
        firsts = [rank * self.num_microbatches + i for rank in self.ranks for i in count]
        return [self._drawn(step, first * self.microbatch_size) for first in firsts]

    def _drawn(self, step: int, first: int) -> Microbatch:
        drawn = [self._sample(step, first + i) for i in range(self.microbatch_size)]
        shapes = {tuple(tensor.shape for tensor in tensors_of(sample)) for sample in drawn}
        if len(shapes) > 1:
            raise RunError(f"example_batch(1) returns tensors of changing shapes: {shapes}")
        return joined_batch(drawn)

    def _sample(self, step: int, position: int) -> Microbatch:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(mixed_seed(self.seed, step, position))
            return checked(self.user.example_batch(1), 1, "example_batch(1)")


class _Loader:
    """What one data-parallel rank reads, pass after pass."""

    def __init__(self, loader: Function, seed: int, microbatch_size: int) -> None:
        self._loader = loader
        self._seed = seed
        self._microbatch_size = microbatch_size
        self._passes = 0
        self._iterator: Iterator[Tree] | None = None

    def take(self) -> Microbatch:
        taken = next(self._running(), None)
        if taken is None:
            self._iterator = None
            self._passes += 1
            taken = next(self._running(), None)
        if taken is None:
            raise RankError("what data_loader returned yields no microbatch in a pass")
        return checked(taken, self._microbatch_size, "data_loader")

    def skip(self, count: int) -> None:
        if hasattr(self._loader, "__len__") and len(self._loader) > 0:
            self._passes, count = divmod(count, len(self._loader))
        for _ in range(count):
            self.take()

    def state(self) -> Tree:
        if not hasattr(self._loader, "state_dict"):
            return None
        return self._passes, self._loader.state_dict()

    def restore(self, state: Tree) -> None:
        self._passes, inner = state
        self._loader.load_state_dict(inner)

    def _running(self) -> Iterator[Tree]:
        if self._iterator is None:
            torch.manual_seed(mixed_seed(self._seed, self._passes))  # of shuffle=True
            holders = [self._loader]
            holders += [getattr(self._loader, name, None) for name in ("sampler", "dataset")]
            for each in holders:
                if hasattr(each, "set_epoch"):
                    each.set_epoch(self._passes)
            self._iterator = iter(self._loader)
        return self._iterator


def checked(batch: Tree, size: int, source: str) -> Microbatch:
    """Return inputs and targets of a batch; a dict is the arguments of a model with its own loss.

    Raises:
        RankError: Its tensors are not of ``size`` samples.
    """
    inputs, targets = _inputs_and_targets(batch)
    for tensor in tensors_of((inputs, targets)):
        if tensor.shape[:1] != (size,):
            raise RankError(
                f"{source} gave a tensor of shape {tuple(tensor.shape)}: its first dim must be "
                f"the samples, {size} here (a DataLoader needs drop_last=True)"
            )
    return inputs, targets


def _inputs_and_targets(batch: Tree) -> Microbatch:
    inputs, targets = (batch, None) if isinstance(batch, Mapping) else batch
    return dict(inputs) if isinstance(inputs, Mapping) else inputs, targets  # of collators, too


def split_batch(batch: Tree, size: int) -> list[Microbatch]:
    """Split inputs and targets of a batch into microbatches of ``size`` samples."""
    leaf = tensors_of(_inputs_and_targets(batch))[0]
    batch = checked(batch, leaf.shape[0], "the training loop")

    def piece(first: int) -> Microbatch:
        cut: Microbatch = tree_map_only(Tensor, lambda tensor: tensor[first : first + size], batch)
        return cut

    return [piece(first) for first in range(0, leaf.shape[0], size)]


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
