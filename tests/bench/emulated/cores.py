"""The share of this machine's cores that each host of an emulated cluster has, and no other uses.

Control groups of Linux: those of version 1 with a hierarchy for cores, or those of version 2. A
host may use all cores, together for no longer than its share of them; a rank that waits leaves what
it does not use to ranks of its host, as on a machine with so many cores.
"""

import contextlib
import os
import time
from pathlib import Path

_ROOTS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))
_PERIOD_US = 4_000
"""As long as the kernel lets a process run that has a core for itself with others."""
_REMOVED_S = 5.0
"""What was killed may take so long to be gone."""


def give(name: str, cores: float) -> None:
    """Make a group that may use so many cores."""
    root = _root()
    _write(root / "cgroup.subtree_control", "+cpu", where_there=True)
    group = root / name
    group.mkdir()
    quota_us = round(cores * _PERIOD_US)
    if (group / "cpu.max").exists():
        _write(group / "cpu.max", f"{quota_us} {_PERIOD_US}")
    else:
        _write(group / "cpu.cfs_period_us", str(_PERIOD_US))
        _write(group / "cpu.cfs_quota_us", str(quota_us))


def enter(name: str) -> None:
    """Move this process to a group, if it was made."""
    _write(_root() / name / "cgroup.procs", str(os.getpid()), where_there=True)


def remove(name: str) -> None:
    """Remove a group, once all that ran in it is gone."""
    group = _root() / name
    end_s = time.monotonic() + _REMOVED_S
    while group.exists():
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.05)


def names(prefix: str) -> list[str]:
    """The groups whose names begin so."""
    with contextlib.suppress(FileNotFoundError):
        return [each.name for each in _root().glob(f"{prefix}*")]
    return []


def _root() -> Path:
    """The hierarchy that shares out cores.

    Raises:
        FileNotFoundError: There is none.
    """
    for root in _ROOTS:
        if (root / "cpu.shares").exists() or (root / "cgroup.controllers").exists():
            return root
    raise FileNotFoundError("no control groups that share out cores (/sys/fs/cgroup)")


def _write(file: Path, text: str, *, where_there: bool = False) -> None:
    if not where_there or file.exists():
        file.write_text(text)
