"""Folders of checkpoints: written whole or not at all, and the newest that is whole."""

import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.storage import WriteResult

from .processes import agreed, is_first_rank, print_once


class _WholeFolder(FileSystemWriter):
    """Writes into a draft, which gets the folder's name once all ranks have written their part.

    A run that is killed meanwhile leaves the draft, whose name no reader takes; the next one
    removes it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._draft = folder.with_name(f".{folder.name}.draft")
        super().__init__(self._draft)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin, on rank 0 alone, before any rank writes."""
        shutil.rmtree(self._draft, ignore_errors=True)
        self._draft.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """End, on rank 0 alone, after all have written."""
        super().finish(metadata, results)
        old = self._folder.with_name(f".{self._folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if self._folder.exists():
            self._folder.rename(old)
        self._draft.rename(self._folder)
        shutil.rmtree(old, ignore_errors=True)


@dataclass(slots=True)
class CheckpointWriter:
    """Writes one checkpoint at a time. All ranks call each method together."""

    _group: dist.ProcessGroup | None = None  # for writers, which talk while training does
    _writing: Future[Any] | None = None

    def write(self, state: Mapping[str, Any], folder: Path, *, wait: bool) -> None:
        """Write what this rank holds, by name; what ranks share is written once.

        A single process always waits until it is written; others may go on when the state is copied
        to the host's memory.

        Raises:
            RunError: It, or the one before, cannot be written: the disk is full, say.
        """
        self.finish()
        if wait or not dist.is_initialized():
            with agreed(f"{folder} cannot be written"), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                save(dict(state), storage_writer=_WholeFolder(folder))
        else:
            self._group = self._group or dist.new_group(backend="gloo")
            writer = _WholeFolder(folder)
            begun = async_save(dict(state), storage_writer=writer, process_group=self._group)
            assert isinstance(begun, Future)
            self._writing = begun

    def finish(self) -> None:
        """Wait for the checkpoint that is being written."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            with agreed("the last checkpoint cannot be written"):
                writing.result()


def keep_newest(folder: Path, count: int) -> None:
    """Remove all checkpoints but the newest ``count``; 0 keeps all."""
    if is_first_rank() and count:
        for checkpoint in _checkpoints(folder)[:-count]:
            shutil.rmtree(checkpoint, ignore_errors=True)


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest whole checkpoint, the same on all ranks; None where there is none.

    Rank 0 says on the screen what was passed over, and that training starts fresh.
    """
    found: list[Path | None] = [None]
    if is_first_rank():
        for checkpoint in reversed(_checkpoints(folder)):
            if not (missing := missing_in(checkpoint)):
                found = [checkpoint]
                break
            print_once(f"{checkpoint} is not whole ({missing}): passed over")
        else:
            print_once(f"{folder} holds no whole checkpoint: training starts at step 0")
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    return found[0]


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if path.name[5:].isdigit())


def missing_in(checkpoint: Path) -> str:
    """Say what a checkpoint lacks; nothing where it is whole."""
    try:
        stored = FileSystemReader(checkpoint).read_metadata().storage_data
    except Exception as error:  # whatever unpickling half a file may raise
        return f".metadata cannot be read: {error}"
    for entry in stored.values():
        file = checkpoint / entry.relative_path
        size = file.stat().st_size if file.is_file() else 0
        if size < entry.offset + entry.length:
            return f"{file.name} is cut short"
    return ""
