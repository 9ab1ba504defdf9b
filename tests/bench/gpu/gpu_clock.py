"""Times work on a device: events on a GPU's own time line, the host's clock on a CPU."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

FLUSH_BYTES = 512 * 2**20
"""Written before each timed call: more than any L2, and longer than the host needs to issue the
call, so that the GPU never waits for it."""

WARM_UP_CALLS = 3
LEAST_REPEATS = 5
MOST_REPEATS = 50

Moment = torch.cuda.Event | float


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Seconds of some repeats."""

    median_s: float
    p10_s: float
    p90_s: float
    repeats: int

    @classmethod
    def of(cls, seconds: list[float]) -> "Spread":
        """Sum up at least two repeats."""
        deciles = statistics.quantiles(seconds, n=10, method="inclusive")
        return cls(
            median_s=statistics.median(seconds),
            p10_s=deciles[0],
            p90_s=deciles[-1],
            repeats=len(seconds),
        )


class Clock:
    """Moments on the time line of a device."""

    def __init__(self, device: torch.device, *, most_repeats: int = MOST_REPEATS) -> None:
        self.device = device
        self._most_repeats = most_repeats
        self._is_gpu = device.type == "cuda"
        self._flushed = torch.empty(
            FLUSH_BYTES if self._is_gpu else 0, dtype=torch.uint8, device=device
        )

    def now(self) -> Moment:
        """Mark the end of the work that was issued so far."""
        if not self._is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Wait until the device has done all that was issued."""
        if self._is_gpu:
            torch.cuda.synchronize(self.device)

    def flush(self) -> None:
        """Throw what earlier calls left out of the L2."""
        self._flushed.zero_()

    def time_call(self, call: Callable[[], object], *, limit_s: float) -> Spread:
        """Time a call from a cold L2, repeated for about ``limit_s`` seconds.

        The call itself must not wait for the device.
        """
        for _ in range(WARM_UP_CALLS):
            call()
        self.wait()
        start_s = time.perf_counter()
        call()
        self.wait()
        repeats = self.repeats_within(limit_s, time.perf_counter() - start_s)
        moments = []
        for _ in range(repeats):
            self.flush()
            start = self.now()
            call()
            moments.append((start, self.now()))
        self.wait()
        return Spread.of([seconds_between(*pair) for pair in moments])

    def repeats_within(self, limit_s: float, once_s: float) -> int:
        """Choose how often something is repeated."""
        return max(LEAST_REPEATS, min(self._most_repeats, int(limit_s / max(once_s, 1e-9))))

    def heat_up(self, duration_s: float) -> None:
        """Keep a GPU busy until its clocks are those of a training load."""
        if not self._is_gpu:
            return
        left = torch.randn(8192, 8192, dtype=torch.bfloat16, device=self.device)
        right = torch.randn_like(left)
        end_s = time.perf_counter() + duration_s
        while time.perf_counter() < end_s:
            for _ in range(20):
                torch.mm(left, right)
            self.wait()


def seconds_between(first: Moment, second: Moment) -> float:
    """Seconds from one moment to a later one; both must have passed."""
    if isinstance(first, float):
        assert isinstance(second, float)
        return second - first
    assert not isinstance(second, float)
    return first.elapsed_time(second) / 1e3
