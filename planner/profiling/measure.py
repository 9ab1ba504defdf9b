"""Measures this machine, or several: starts the ranks and keeps the points that they find."""

import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from planner.errors import ProfileError, RequestError
from planner.profiling.points import (
    MARK,
    Machine,
    Point,
    PointFile,
    Settings,
    processor_name,
)
from planner.progress import PhaseEvent, ProgressCallback

PHASE = "measure"

QUICK_LIMIT_S, LIMIT_S = 0.006, 0.05
"""Time of one op."""

PORT = 29871


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where ranks run."""

    hosts: tuple[str, ...] = ()
    """The first is where they meet; () for this machine alone."""
    remote: str = "ssh {host}"
    """Command that runs the rest of its line on a host."""

    def prefix(self, host: str) -> list[str]:
        """What stands before a command."""
        return shlex.split(self.remote.format(host=host)) if self.hosts else []


def this_machine(device: str) -> Machine:
    """Describe the machine.

    Raises:
        RequestError: There is no such device.
    """
    if device == "cuda":
        import torch  # the ranks of a CPU import it meanwhile

        if not torch.cuda.is_available():
            raise RequestError("--device cuda: torch sees no GPU here", hint="--device cpu")
        properties = torch.cuda.get_device_properties(0)
        memory_bytes, num_sms = properties.total_memory, properties.multi_processor_count
        name, ranks = torch.cuda.get_device_name(0), torch.cuda.device_count()
    else:
        name, ranks = "cpu", len(os.sched_getaffinity(0))
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        num_sms = 1
    return Machine(
        processor=processor_name(),
        cores=len(os.sched_getaffinity(0)),
        torch=importlib.metadata.version("torch"),
        device=name,
        memory_bytes=memory_bytes,
        num_sms=num_sms,
        ranks=ranks,
    )


def measure(
    file: PointFile,
    machine: Machine,
    settings: Settings,
    *,
    places: Places,
    progress: ProgressCallback | None,
) -> None:
    """Run what is not yet measured.

    Args:
        file: Points so far; it gets the others.
        machine: What is measured.
        settings: How.
        places: Where ranks run.
        progress: Receives how far it is.

    Raises:
        ProfileError: A rank ended early.
    """
    started_s, before = time.monotonic(), len(file.points)
    for point in _points(file, machine, settings, places):
        file.add(point)
        done = len(file.points) - before
        left = point["left"]
        left_s = (time.monotonic() - started_s) / done * left
        if progress is not None:
            fraction = done / (done + left)
            detail = f"{point['job']}, {left_s:.0f} s left"
            progress(PhaseEvent(phase=PHASE, elapsed_s=None, fraction=fraction, detail=detail))


def _points(
    file: PointFile,
    machine: Machine,
    settings: Settings,
    places: Places,
) -> Iterator[Point]:
    """Start the ranks of all hosts and read what rank 0 tells."""
    asked = {
        "processes": settings.processes,
        "device": "cpu" if machine.device == "cpu" else "cuda",
        "quick": settings.quick,
        "done": file.done,
        "limit_s": QUICK_LIMIT_S if settings.quick else LIMIT_S,
        "hosts": settings.hosts,
        "endpoint": f"{places.hosts[0]}:{PORT}" if places.hosts else "localhost:0",
    }
    environment = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}
    with tempfile.TemporaryFile("w+") as words:
        started = []
        try:
            for number, host in enumerate(places.hosts or ("",)):
                node = [sys.executable, "-W", "ignore", "-m", "planner.profiling.node"]
                node.append(json.dumps({**asked, "host": number}))
                command = [*places.prefix(host), *node]
                out = subprocess.PIPE if number == 0 else subprocess.DEVNULL
                started.append(
                    subprocess.Popen(command, stdout=out, stderr=words, text=True, env=environment)
                )
            first = started[0]
            assert first.stdout is not None
            for line in first.stdout:
                if line.startswith(MARK):
                    yield json.loads(line.removeprefix(MARK))
            codes = [each.wait() for each in started]
        finally:
            for each in started:
                if each.poll() is None:
                    each.terminate()
                    each.wait()
                if each.stdout is not None:
                    each.stdout.close()
        if any(codes):
            words.seek(0)
            raise _rank_ended(words.read(), file)


def _rank_ended(words: str, file: PointFile) -> ProfileError:
    """Say which rank ended, and what it said."""
    lines = [line for line in words.splitlines() if line.strip()]
    wanted: Callable[[str], bool] = lambda line: "exitcode" in line or "Error" in line  # noqa: E731
    told = [line.strip() for line in lines if wanted(line)][-3:]
    after = f" after {file.points[-1]['job']!r}" if file.points else ""
    return ProfileError(
        f"a rank ended before all was measured{after}:\n  " + "\n  ".join(told or lines[-3:]),
        hint=f"no profile was written; {len(file.points)} points are in {file.path}, and the same "
        "command goes on from them",
    )
