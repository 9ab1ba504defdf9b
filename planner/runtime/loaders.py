"""The microbatches of a step, of the model file's ``data_loader``."""

import pickle
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from .data import checked, drawn_microbatches, mixed_seed
from .model import UserModel
from .processes import RankError
from .trees import Function, Microbatch, Tree


@dataclass(slots=True, kw_only=True)
class Data:
    """What this process reads: of a ``data_loader``, or drawn where the model file has none."""

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
    loaders: "dict[str, _Loader]" = field(default_factory=dict)

    def start(self, step: int, checkpoint: Path | None) -> None:
        """Open the loaders where training goes on.

        Args:
            step: Steps taken so far: what was read in them is passed over.
            checkpoint: May have states of loaders, which say the same.
        """
        data_loader, size = self.user.function("data_loader"), self.microbatch_size
        for rank in self.ranks if data_loader is not None else ():
            made = data_loader(rank, self.world_size, size, self.seed)
            loader = _Loader(made, mixed_seed(self.seed, rank), size)
            name = f"loader-{rank}-of-{self.world_size}-by-{size}"
            state = read_extra(checkpoint, name) if checkpoint is not None else None
            if state is None:
                loader.skip(step * self.num_microbatches)
            else:
                loader.restore(pickle.loads(state))
            self.loaders[name] = loader

    def state(self) -> dict[str, bytes]:
        """Return where loaders are that have a state, by a name that differs between ranks."""
        states = {name: loader.state() for name, loader in self.loaders.items()}
        return {name: pickle.dumps(state) for name, state in states.items() if state is not None}

    def microbatches(self, step: int) -> list[Microbatch]:
        """Return this process's microbatches of a step, on the CPU; steps come in order."""
        count, size = self.num_microbatches, self.microbatch_size
        if self.loaders:
            return [loader.take() for loader in self.loaders.values() for _ in range(count)]
        samples = [rank * count * size + i for rank in self.ranks for i in range(count * size)]
        return drawn_microbatches(self.user, self.seed, step, samples, size)


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


def read_extra(checkpoint: Path, name: str) -> bytes | None:
    """Return what ``ParallelModel.save`` got as extra under a name; None where there is nothing."""
    reader = FileSystemReader(checkpoint)
    if f"extra.{name}" not in reader.read_metadata().state_dict_metadata:
        return None
    found = {f"extra.{name}": b""}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(found, storage_reader=reader, no_dist=True)
    return found[f"extra.{name}"]
