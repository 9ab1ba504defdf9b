"""Folders of checkpoints: written whole or not at all, and the newest that is whole."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader

from .processes import agreed, is_first_rank, print_once


def checkpoint_folder(folder: Path, step: int) -> Path:
    """Return where the checkpoint after ``step`` steps lies."""
    return folder / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """Return the number of steps that a checkpoint has seen."""
    return int(checkpoint.name.removeprefix("step-"))


@contextlib.contextmanager
def published(target: Path) -> Iterator[Path]:
    """Yield a draft of a folder for all ranks to write into; it gets its name once it is whole.

    A run that is killed meanwhile leaves the draft, whose name no reader takes; the next one
    removes it.

    Raises:
        RunError: The folder cannot be written, the disk is full, say.
    """
    draft, old = target.with_name(f".{target.name}.draft"), target.with_name(f".{target.name}.old")
    with agreed(f"{target} cannot be written"):
        if is_first_rank():
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
    with agreed(f"{target} cannot be written"):
        yield draft
    with agreed(f"{target} cannot be written"):
        if is_first_rank():
            shutil.rmtree(old, ignore_errors=True)
            if target.exists():
                target.rename(old)
            draft.rename(target)
            shutil.rmtree(old, ignore_errors=True)


def keep_newest(folder: Path, count: int) -> None:
    """Remove all checkpoints but the newest ``count``; 0 keeps all."""
    if is_first_rank() and count:
        for checkpoint in _checkpoints(folder)[:-count]:
            shutil.rmtree(checkpoint, ignore_errors=True)


def newest_checkpoint(folder: Path | None) -> Path | None:
    """Return the newest whole checkpoint, the same on all ranks; None where there is none.

    Rank 0 says on the screen what was passed over, and that training starts fresh.
    """
    found: list[Path | None] = [None]
    if is_first_rank() and folder is not None:
        for checkpoint in reversed(_checkpoints(folder)):
            if missing := missing_in(checkpoint):
                print_once(f"{checkpoint} is not whole ({missing}): passed over")
            else:
                found = [checkpoint]
                break
        else:
            print_once(f"{folder} holds no whole checkpoint: training starts at step 0")
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    return found[0]


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if path.name[5:].isdigit())


def missing_in(checkpoint: Path) -> str:
    """Say what a checkpoint lacks; nothing where it is whole."""
    if not (checkpoint / ".metadata").is_file():
        return "no .metadata"
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
