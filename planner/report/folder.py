"""Writing a folder of files: all of them or none, and never over what is already there."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from planner.errors import RequestError


def check_folder(folder: Path, *, force: bool) -> None:
    """Make sure, before any work is done, that a folder can be written.

    Args:
        folder: Folder that will be written; it need not exist.
        force: Whether files in it may be replaced.

    Raises:
        RequestError: The folder holds files and ``force`` is false, or it cannot be written.
    """
    folder = folder.absolute()
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise RequestError(
            f"--out {folder}: {existing} is a file, not a folder",
            hint="Choose another folder with --out DIR.",
        )
    if existing == folder and not force and any(folder.iterdir()):
        raise RequestError(
            f"--out {folder}: the folder is not empty, and nothing is overwritten unasked",
            hint="Choose another folder with --out DIR, or replace its files with --force.",
        )
    probe = existing / f".planner-{os.getpid()}.tmp"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise _cannot_write(folder, error) from error


def free_folder(wanted: Path) -> Path:
    """Find a folder name that is free: "gpt", or else "gpt-2", "gpt-3"."""
    candidate, number = wanted, 1
    while candidate.exists() and not (candidate.is_dir() and not any(candidate.iterdir())):
        number += 1
        candidate = wanted.with_name(f"{wanted.name}-{number}")
    return candidate


def write_folder(folder: Path, files: Mapping[str, str], *, force: bool) -> tuple[Path, ...]:
    """Write files into a folder.

    They are written to a hidden folder beside it first and moved when all of them are complete;
    other files in the folder (logs, checkpoints) stay.

    Args:
        folder: Made with its parents where it does not exist.
        files: Text by file name.
        force: Replace files of the same name in a folder that is not empty.

    Returns:
        Paths of the files, in the given order.

    Raises:
        RequestError: As ``check_folder``, or when writing fails.
    """
    check_folder(folder, force=force)
    target = folder.absolute()
    draft = target.with_name(f".{target.name}-{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft.mkdir()
        for name, text in files.items():
            (draft / name).write_text(text, encoding="utf-8", newline="")
        if not target.exists():
            draft.rename(target)
        else:
            for name in files:
                (draft / name).replace(target / name)
    except OSError as error:
        raise _cannot_write(folder, error) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return tuple(folder / name for name in files)


def _cannot_write(folder: Path, error: OSError) -> RequestError:
    return RequestError(
        f"--out {folder}: the folder cannot be written: {error.strerror}",
        hint="Choose a folder that you may write with --out DIR.",
    )
