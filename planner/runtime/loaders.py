"""The microbatches of a step, of the model file's ``data_loader``."""

import pickle
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from .data import checked, mixed_seed
from .model import UserModel
from .processes import RankError
from .trees import Function, Microbatch, Tree


class Loaders:
    """What this process reads, step after step."""

    def __init__(
        self, user: UserModel, seed: int, ranks: Sequence[int], world_size: int, size: int
    ) -> None:
        """Open the loaders.

        Args:
            user: Offers ``data_loader(rank, world_size, microbatch_size, seed)``.
            seed: Seed of the whole training run.
            ranks: The data-parallel ranks whose samples this process reads: one, or all (the
                reference).
            world_size: All data-parallel ranks.
            size: Samples per microbatch.
        """
        data_loader = user.function("data_loader", needed_by="this script")
        self._loaders = {
            f"loader-{rank}-of-{world_size}-by-{size}": _Loader(
                data_loader(rank, world_size, size, seed), mixed_seed(seed, rank), size
            )
            for rank in ranks
        }

    def start(self, count: int, checkpoint: Path | None) -> None:
        """Go on where training does.

        Args:
            count: Microbatches of each loader that were read so far, and are passed over.
            checkpoint: May have states of loaders, which say the same.
        """
        for name, loader in self._loaders.items():
            state = read_extra(checkpoint, name) if checkpoint is not None else None
            if state is None:
                loader.skip(count)
            else:
                loader.restore(pickle.loads(state))

    def state(self) -> dict[str, bytes]:
        """Return where loaders are that have a state, by a name that differs between ranks."""
        states = {name: loader.state() for name, loader in self._loaders.items()}
        return {name: pickle.dumps(state) for name, state in states.items() if state is not None}

    def take(self, count: int) -> list[Microbatch]:
        """Return the next microbatches of each loader, on the CPU."""
        return [loader.take() for loader in self._loaders.values() for _ in range(count)]


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
