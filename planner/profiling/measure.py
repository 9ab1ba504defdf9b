"""Measures this machine, or several, and writes what planning needs of it."""

import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import torch

from planner.errors import ProfileError, RequestError
from planner.profiling.document import Writer, cluster_text, device_text
from planner.profiling.host_fit import fit_script
from planner.profiling.links import LinkFound, fit_links
from planner.profiling.op_fit import DeviceFit, fit_device
from planner.profiling.points import Machine, Point, PointFile, Settings, processor_name
from planner.profiling.rank import MARK
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was written, and what to say of it."""

    files: dict[str, str]
    """Texts of the cluster's and the device's file, by name."""
    device: DeviceFit
    links: tuple[LinkFound, ...]
    where: str
    """When, where and how."""
    busy: float
    """How much longer the ranks took than their own work on the cores that there are: 1 on a
    machine that does nothing else."""


def this_machine(device: str) -> Machine:
    """Describe the machine.

    Raises:
        RequestError: There is no such device.
    """
    if device == "cuda":
        if not torch.cuda.is_available():
            raise RequestError("--device cuda: torch sees no GPU here", hint="--device cpu")
        properties = torch.cuda.get_device_properties(0)
        memory_bytes, num_sms = properties.total_memory, properties.multi_processor_count
        ranks = torch.cuda.device_count()
    else:
        ranks = len(os.sched_getaffinity(0))
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        num_sms = 1
    return Machine(
        processor=processor_name(),
        cores=len(os.sched_getaffinity(0)),
        torch=torch.__version__,
        device="cpu" if device == "cpu" else torch.cuda.get_device_name(0),
        memory_bytes=memory_bytes,
        num_sms=num_sms,
        ranks=ranks,
    )


def measure(
    name: str,
    file: PointFile,
    machine: Machine,
    settings: Settings,
    *,
    places: Places,
    progress: ProgressCallback | None,
) -> Measured:
    """Run what is not yet measured, and turn the points into profiles.

    Args:
        name: Of the cluster.
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
    return profile(name, file, machine, settings)


def profile(name: str, file: PointFile, machine: Machine, settings: Settings) -> Measured:
    """Turn points into profiles."""
    points = file.points
    date = datetime.fromtimestamp(file.path.stat().st_mtime, UTC).date().isoformat()
    device = fit_device(machine, points)
    writer = Writer(machine, settings, date, device.spread)
    script = fit_script(device.device, points)
    residue = next(p for p in points if p["kind"] == "residue")
    full_speed = full_speed_ranks(machine, settings, points)
    links = fit_links(
        device.device,
        settings,
        points,
        hides_traffic=machine.device != "cpu",
        turns=settings.processes / full_speed,
    )
    device_file = f"{name}-device.toml"
    files = {
        f"{name}.toml": cluster_text(
            name,
            device_file,
            writer,
            links=links,
            script=script,
            full_speed_ranks=full_speed,
        ),
        device_file: device_text(f"{name}-device", device.device, writer, residue=residue),
    }
    ops = [p for p in points if p["kind"] == "op"]
    turns = settings.processes / full_speed
    busy = sum(p["wall_s"] for p in ops) / max(1e-9, turns * sum(p["cpu_s"] for p in ops))
    return Measured(files=files, device=device, links=links, where=writer.where, busy=busy)


def full_speed_ranks(machine: Machine, settings: Settings, points: Sequence[Point]) -> float:
    """Find how many ranks of a host get on as fast as one alone would.

    No more than it has cores; less where cores share what they work with. It is told by how much
    longer all ranks take for more work between the same collectives, at the median of some times.
    """
    if machine.device != "cpu":
        return float(settings.processes)
    cores = float(min(settings.processes, machine.cores))
    works = [(p["own_s"], p["both_s"]) for p in points if p["kind"] == "work"]
    found = []
    for (less_own_s, less_both_s), (own_s, both_s) in zip(works[::2], works[1::2], strict=True):
        more_s = own_s - less_own_s
        found.append(settings.processes * more_s / max(both_s - less_both_s, more_s))
    return min(cores, float(statistics.median(found))) if found else cores


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
