"""The microbatches of a step, of the model file's ``data_loader``."""

import pickle
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from .data import Data, checked, mixed_seed
from .processes import RankError
from .trees import Function, Microbatch, Tree


@dataclass(slots=True, kw_only=True)
class LoadedData(Data):
    """What loaders give, made by ``data_loader(rank, world_size, microbatch_size, seed)``."""

    loaders: "list[_Loader]" = field(default_factory=list)

    def start(self, step: int, checkpoint: Path | None) -> None:
        """Open the loaders where training goes on.

        Args:
            step: Steps taken so far: what was read in them is passed over.
            checkpoint: May have states of loaders, which say the same.
        """
        data_loader = self.user.function("data_loader", needed_by="this script")
        for rank in self.ranks:
            made = data_loader(rank, self.world_size, self.microbatch_size, self.seed)
            loader = _Loader(made, mixed_seed(self.seed, rank), self.microbatch_size)
            state = read_extra(checkpoint, self._name(rank)) if checkpoint is not None else None
            if state is None:
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
        """Return this process's microbatches of a step, on the CPU; steps come in order."""
        return [loader.take() for loader in self.loaders for _ in range(self.num_microbatches)]


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
        dcp.load(found, storage_reader=reader, no_dist=True)
    return found[f"extra.{name}"]
