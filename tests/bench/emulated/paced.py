"""Runs emitted scripts on an emulated cluster, a step at a time.

Every script has processes of its own, one for each rank, that live until its last step; which of
them takes its next step is decided from here. So the steps of many layouts alternate, and what
slows the machine down for a while slows all of them.

Ranks are forks of one process that has imported torch (``tests/run/driver.py``). Rank r computes on
core r modulo their number, with one thread.
"""

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "run"))

from driver import FORKS, IMPORTED, process_group
from network import INTERFACE, Host

LIMIT_S = 120.0
"""For the start of a script, and for a step."""

_NEXT, _READY, _DONE = "next", "ready", "done"


class RunFailedError(Exception):
    """A rank has failed; the message is what it has printed."""


@dataclass(slots=True)
class StepFigures:
    """What the ranks measured in one step."""

    step_time_s: float
    """Of the slowest rank."""
    sent_bytes: tuple[int, ...]
    """What the host of each rank has sent meanwhile, to itself too, headers included."""


@dataclass(slots=True)
class PacedRun:
    """A script on all ranks, between two steps."""

    folder: Path
    """Of the plan."""
    ranks: list[Any] = field(default_factory=list)
    """Processes."""
    ends: list[connection.Connection] = field(default_factory=list)
    """To each of them."""
    steps: list[StepFigures] = field(default_factory=list)
    """Taken so far."""
    memory_bytes: tuple[int, ...] = ()
    """By rank: peak resident memory less what was resident before the script began; known at the
    end."""

    def start(self, places: Sequence[Host], steps: int) -> None:
        """Start a rank at each place; all stop before their first step."""
        FORKS.set_forkserver_preload(IMPORTED)
        with contextlib.suppress(FileNotFoundError):
            (self.folder / "meeting").unlink()
        for rank, place in enumerate(places):
            here, there = FORKS.Pipe()
            arguments = (str(self.folder), steps, place, rank, len(places), there)
            process = FORKS.Process(target=run_rank, args=arguments, daemon=True)
            process.start()
            there.close()
            self.ranks.append(process)
            self.ends.append(here)

    def wait_ready(self) -> None:
        """Wait until all ranks stand before a step.

        Raises:
            RunFailedError: One does not get there.
        """
        for rank in range(len(self.ranks)):
            self._hear(rank, _READY)

    def step(self) -> StepFigures:
        """Let all ranks take a step."""
        for end in self.ends:
            end.send(_NEXT)
        seen = [self._hear(rank, _DONE) for rank in range(len(self.ranks))]
        times, sent = zip(*seen, strict=True)
        self.steps.append(StepFigures(step_time_s=max(times), sent_bytes=sent))
        return self.steps[-1]

    def finish(self) -> None:
        """After the last step, learn what memory it took."""
        self.memory_bytes = tuple(self._hear(rank, "memory") for rank in range(len(self.ranks)))

    def stop(self) -> None:
        """End all ranks."""
        for process in self.ranks:
            process.kill()
            process.join()

    def _hear(self, rank: int, word: str) -> Any:
        end = self.ends[rank]
        try:
            if end.poll(LIMIT_S):
                said, value = end.recv()
                if said == word:
                    return value
        except EOFError:
            pass
        printed = "".join(
            f"rank {each}: {output_of(self.folder, each).read_text()[-3000:]}"
            for each in range(len(self.ranks))
        )
        raise RunFailedError(f"{self.folder}: rank {rank} does not say {word!r}\n{printed}")


def output_of(folder: Path, rank: int) -> Path:
    """What a rank prints goes there."""
    return folder / f"rank-{rank}.txt"


@contextlib.contextmanager
def paced_runs(
    folders: Sequence[Path], places: Sequence[Host], *, steps: int
) -> Iterator[list[PacedRun]]:
    """Start scripts side by side, each of which stands before its first step.

    Args:
        folders: Of their plans.
        places: The host of each rank.
        steps: To take in all.
    """
    runs = [PacedRun(folder) for folder in folders]
    try:
        for run in runs:
            run.start(places, steps)
        yield runs
    finally:
        for run in runs:
            run.stop()


# -- in the processes of the ranks ----------------------------------------------------------------


def run_rank(
    folder: str,
    steps: int,
    place: Host,
    rank: int,
    num_ranks: int,
    end: connection.Connection,
) -> None:
    """Run a script as one rank, which asks before each step."""
    with output_of(Path(folder), rank).open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    place.enter()
    with process_group(rank, num_ranks, Path(folder) / "meeting"):
        script = _load(folder)
        script.Log = _paced(script.Log, end)
        started_bytes = _status_bytes("VmRSS")
        script.main(["--steps", str(steps), "--log-file", str(Path(folder) / "log.jsonl")])
        end.send(("memory", _status_bytes("VmHWM") - started_bytes))
        end.poll(LIMIT_S)  # until this process is ended
    os._exit(0)


def _load(folder: str) -> Any:
    sys.path[:] = [folder, *sys.path]
    spec = importlib.util.spec_from_file_location("train", Path(folder) / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _paced(log: type, end: connection.Connection) -> type:
    """The script's log, which waits for a word before each step and tells of it afterwards."""

    class PacedLog(log):  # type: ignore[misc,valid-type]
        def start_step(self) -> None:
            end.send((_READY, None))
            end.recv()
            self._sent_bytes = _sent_bytes()
            super().start_step()

        def _measured(self, step_time_s: float, memory_bytes: int) -> Any:
            self._step_time_s = step_time_s
            return super()._measured(step_time_s, memory_bytes)

        def end_step(self, *arguments: Any, **keywords: Any) -> bool:
            self._step_time_s = 0.0
            stops = super().end_step(*arguments, **keywords)
            end.send((_DONE, (self._step_time_s, _sent_bytes() - self._sent_bytes)))
            return bool(stops)

    return PacedLog


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _sent_bytes() -> int:
    """What all ranks of this host have sent; /sys would show the namespace it was mounted in."""
    lines = [line.split() for line in Path("/proc/self/net/dev").read_text().splitlines()]
    return sum(int(each[9]) for each in lines if each[0] in (f"{INTERFACE}:", "lo:"))
