"""What a long run tells about itself while it runs: named phases with their times."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEvent:
    """A phase of a run begins, is under way or ends."""

    phase: str
    """What is done, as a person would say it: "trace", "search"."""
    elapsed_s: float | None
    """Wall time it took, None until it has ended."""
    fraction: float | None = None
    """Part of the work that is done, 0 to 1, where that is known; None when it begins."""
    detail: str = ""
    """What is being done in it: "forward, 9,214 operators"."""


ProgressCallback = Callable[[PhaseEvent], None]
"""Receives each event as it happens, on the caller's thread."""


@contextmanager
def timed_phase(progress: ProgressCallback | None, phase: str) -> Iterator[None]:
    """Report the begin of a phase, and its end with the wall time it took.

    A phase that raises is not reported as ended.

    Args:
        progress: Receiver, None to report to nobody.
        phase: What is done.
    """
    if progress is None:
        yield
        return
    progress(PhaseEvent(phase=phase, elapsed_s=None))
    start_s = time.perf_counter()
    yield
    progress(PhaseEvent(phase=phase, elapsed_s=time.perf_counter() - start_s))
