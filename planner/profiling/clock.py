"""Times work on a device: events on a GPU's own time line, the thread's own time on a CPU.

Ranks that share cores are preempted in the middle of an op, and so is any process on a machine that
does other work too. What an op takes of its core is told by the time that its thread has run, in
calls one after the other: it counts caches and memory shared with the others, but not the wait for
a core, which all ranks on a core have in common (``full_speed_ranks_per_node`` of a cluster).

A training step writes each result to memory that it has not just used, since it keeps what its
backward needs. So what calls return is kept for a while: written to the same place again and again,
a result stays in a cache and takes less time. (Operands: ``planner.profiling.kernels.in_turn``.)
"""

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_leaves

FLUSH_BYTES = 512 * 2**20
"""Written before each timed call: more than any L2, and longer than the host needs to issue the
call, so that the GPU never waits for it."""

WARM_UP_CALLS = 3
LEAST_REPEATS = 5
MOST_REPEATS = 50

KEPT_BYTES = 32 * 2**20
"""Results of a CPU that are kept, and copies of operands that are used in turn: as long as a cache
of the last level, or longer."""

CPU_STRETCHES = 5
"""Stretches of calls on a CPU, each of which is one repeat."""

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
        self.is_gpu = device.type == "cuda"
        self._flushed = torch.empty(
            FLUSH_BYTES if self.is_gpu else 0, dtype=torch.uint8, device=device
        )

    def now(self) -> Moment:
        """Mark the end of the work that was issued so far."""
        if not self.is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self) -> None:
        """Wait until the device has done all that was issued."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def flush(self) -> None:
        """Throw what earlier calls left out of the L2."""
        self._flushed.zero_()

    def time_call(self, call: Callable[[], object], *, limit_s: float) -> Spread:
        """Time a call, repeated for about ``limit_s`` seconds.

        On a GPU each starts from a cold L2, and the call itself must not wait for the device.
        """
        if not self.is_gpu:
            return self._time_on_cpu(call, limit_s)
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

    def _time_on_cpu(self, call: Callable[[], object], limit_s: float) -> Spread:
        """Time stretches of calls by what the thread has run."""
        result = call()
        num_bytes = sum(t.nbytes for t in tree_leaves(result) if isinstance(t, torch.Tensor))
        kept: deque[object] = deque(maxlen=KEPT_BYTES // max(1, num_bytes, KEPT_BYTES // 1000))
        once_s = max(min(self._once_on_cpu(call, kept) for _ in range(WARM_UP_CALLS)), 1e-7)
        calls = max(1, min(self._most_repeats * 20, int(limit_s / CPU_STRETCHES / once_s)))
        seconds = []
        for _ in range(CPU_STRETCHES):
            start_s = time.thread_time()
            for _ in range(calls):
                kept.append(call())
            seconds.append((time.thread_time() - start_s) / calls)
        return Spread.of(seconds)

    @staticmethod
    def _once_on_cpu(call: Callable[[], object], kept: deque[object]) -> float:
        start_s = time.thread_time()
        kept.append(call())
        return time.thread_time() - start_s

    def repeats_within(self, limit_s: float, once_s: float) -> int:
        """Choose how often something is repeated."""
        return max(LEAST_REPEATS, min(self._most_repeats, int(limit_s / max(once_s, 1e-9))))

    def heat_up(self, duration_s: float) -> None:
        """Keep a GPU busy until its clocks are those of a training load."""
        if not self.is_gpu:
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
    return float(first.elapsed_time(second)) / 1e3
