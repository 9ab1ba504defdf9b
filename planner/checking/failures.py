"""What is said of a script that failed: the error, the rank, and where all that it printed lies."""

import re
import signal
import tempfile

from planner.errors import CheckError

_RANK = re.compile(r"^rank (\d+) failed: (.*)$", re.MULTILINE)
"""How a script ends what it prints of a rank that failed (``planner.runtime.processes``)."""

_REFUSED = re.compile(r": error: (.+)$", re.MULTILINE)
"""How it prints what it refuses."""

_KILLED = re.compile(r"failed \(exitcode: -(\d+)\) local_rank: (\d+)")
"""How its launcher says that a signal ended a rank."""


def script_failure(printed: str, *, code: int) -> CheckError:
    """Say how a script failed, by what the first rank to fail has printed.

    Args:
        printed: All that the script and its launcher printed.
        code: Exit code.
    """
    failed = _RANK.search(printed)
    if failed:
        return failure(f"the script failed on rank {failed[1]}: {failed[2]}", printed)
    refused = _REFUSED.search(printed)
    if refused:
        return failure(f"the script refused to run: {refused[1]}", printed)
    killed = _KILLED.search(printed)
    if killed:
        number, rank = map(int, killed.groups())
        words = f"signal {number} ended rank {rank}"
        if number == signal.SIGKILL:
            words += ", as where a machine has no memory left: all ranks ran on this one"
        return failure(words, printed)
    return failure(f"the script ended with code {code}", printed)


def failure(words: str, printed: str) -> CheckError:
    """Make an error of one line, and keep the rest in a file."""
    with tempfile.NamedTemporaryFile(
        "w", prefix="plan-check-", suffix=".log", delete=False, encoding="utf-8"
    ) as log:
        log.write(printed)
    return CheckError(words.partition("\n")[0], hint=f"All that it printed is in {log.name}")
