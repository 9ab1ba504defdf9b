"""Writing files, in a folder or alone: whole or not at all, never over what is already there."""

import os
import shutil
from collections.abc import Collection, Mapping
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
    try:
        _probe(existing)
    except OSError as error:
        raise _cannot_write(folder, error) from error


def check_file(file: Path, *, option: str, force: bool) -> None:
    """Make sure, before any work is done, that a file can be written.

    Args:
        file: File that will be written; its folder need not exist.
        option: Option that names it, for messages: "--ops".
        force: Whether it may be replaced.

    Raises:
        RequestError: It exists and ``force`` is false, or it cannot be written.
    """
    if _is_stream(file):
        return
    target = file.resolve()
    if target.is_dir():
        raise RequestError(
            f"{option} {file}: this is a folder, not a file",
            hint=f"Name a file in it: {option} {file / 'FILE'}.",
        )
    if target.exists() and not force:
        raise RequestError(
            f"{option} {file}: the file exists, and nothing is overwritten unasked",
            hint=f"Choose another name with {option}, or replace it with --force.",
        )
    existing = target.parent
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        _probe(existing)
    except OSError as error:
        raise _file_error(file, option, error) from error


def check_files(files: Mapping[str, Path | None], *, force: bool) -> None:
    """Make sure, before any work is done, that files can be written.

    Args:
        files: File by the option that names it, None where it is not asked for.
        force: Whether they may be replaced.

    Raises:
        RequestError: As ``check_file``, or two options name the same file.
    """
    seen: dict[Path, str] = {}
    for option, file in files.items():
        if file is None:
            continue
        check_file(file, option=option, force=force)
        other = seen.setdefault(file.resolve(), f"{option} {file}")
        if other != f"{option} {file}":
            raise RequestError(
                f"{other} {option} {file}: both are the same file",
                hint="Give each of them a name of its own.",
            )


def write_file(file: Path, content: str | bytes, *, option: str, force: bool) -> None:
    """Write a file: beside its place first, then moved there when it is complete.

    Args:
        file: Its folder is made where it does not exist. Devices and pipes ("/dev/stdout") are
            written to as they are.
        content: Its text, or its bytes as they are.
        option: Option that names it, for messages.
        force: Replace it.

    Raises:
        RequestError: As ``check_file``, or when writing fails.
    """
    check_file(file, option=option, force=force)
    data = content.encode() if isinstance(content, str) else content
    if _is_stream(file):
        file.write_bytes(data)
        return
    target = file.resolve()
    draft = target.with_name(f".{target.name}-{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(data)
        draft.replace(target)
    except OSError as error:
        raise _file_error(file, option, error) from error
    finally:
        draft.unlink(missing_ok=True)


def free_folder(wanted: Path) -> Path:
    """Find a folder name that is free: "gpt", or else "gpt-2", "gpt-3"."""
    candidate, number = wanted, 1
    while candidate.exists() and not (candidate.is_dir() and not any(candidate.iterdir())):
        number += 1
        candidate = wanted.with_name(f"{wanted.name}-{number}")
    return candidate


def write_folder(
    folder: Path, files: Mapping[str, str], *, force: bool, owned: Collection[str] = ()
) -> tuple[Path, ...]:
    """Write files into a folder.

    They are written to a hidden folder beside it first and moved when all of them are complete;
    other files in the folder (logs, checkpoints) stay.

    Args:
        folder: Made with its parents where it does not exist.
        files: Text by file name, which may lie in a folder: "runtime/log.py".
        force: Replace files of the same name in a folder that is not empty.
        owned: Names of all files that might be among them; those of earlier ones are removed.

    Returns:
        Paths of the files, in the given order; a folder among them once, for all that it holds.

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
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            (draft / name).write_text(text, encoding="utf-8", newline="")
        if not target.exists():
            draft.rename(target)
        else:
            for name in files:
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                (draft / name).replace(target / name)
            for name in set(owned).difference(files):
                (target / name).unlink(missing_ok=True)
    except OSError as error:
        raise _cannot_write(folder, error) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return tuple(folder / name for name in dict.fromkeys(Path(name).parts[0] for name in files))


def _is_stream(file: Path) -> bool:
    return file.exists() and not file.is_file() and not file.is_dir()


def _probe(folder: Path) -> None:
    """Make something in a folder and remove it again."""
    probe = folder / f".planner-{os.getpid()}.tmp"
    probe.mkdir()
    probe.rmdir()


def _file_error(file: Path, option: str, error: OSError) -> RequestError:
    return RequestError(
        f"{option} {file}: the file cannot be written: {error.strerror}",
        hint=f"Choose a place where you may write with {option} FILE.",
    )


def _cannot_write(folder: Path, error: OSError) -> RequestError:
    return RequestError(
        f"--out {folder}: the folder cannot be written: {error.strerror}",
        hint="Choose a folder that you may write with --out DIR.",
    )
