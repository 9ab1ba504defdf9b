"""What is said of a script that failed: the error, the rank, and where all that it printed lies."""

import re
import tempfile

from planner.errors import CheckError

_RANK = re.compile(r"^rank (\d+): Traceback", re.MULTILINE)
"""How a script begins to print what a rank failed with (``planner.runtime.processes``)."""

_REFUSED = re.compile(r": error: (.+)$", re.MULTILINE)
"""How it prints what it refuses."""


def script_failure(printed: str, *, code: int) -> CheckError:
    """Say how a script failed, by what the first rank to fail has printed.

    Args:
        printed: All that the script and its launcher printed.
        code: Exit code.
    """
    ranks = list(_RANK.finditer(printed))
    if ranks:
        end = ranks[1].start() if len(ranks) > 1 else len(printed)
        rank, error = ranks[0][1], _error_line(printed[ranks[0].end() : end])
        return failure(f"the script failed on rank {rank}: {error}", printed)
    refused = _REFUSED.search(printed)
    if refused:
        return failure(f"the script refused to run: {refused[1]}", printed)
    return failure(f"the script ended with code {code}", printed)


def failure(words: str, printed: str) -> CheckError:
    """Make an error of one line, and keep the rest in a file."""
    with tempfile.NamedTemporaryFile(
        "w", prefix="plan-check-", suffix=".log", delete=False, encoding="utf-8"
    ) as log:
        log.write(printed)
    return CheckError(words.partition("\n")[0], hint=f"All that it printed is in {log.name}")


def _error_line(trace: str) -> str:
    """The first line behind the last frame of a traceback."""
    behind = trace.rpartition('\n  File "')[2].splitlines()[1:]
    return next((line for line in behind if line and not line.startswith(" ")), "no error is said")
