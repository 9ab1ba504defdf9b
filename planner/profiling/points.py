"""Raw points of a measurement, kept line by line so that an interrupted one goes on."""

import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from planner.errors import ProfileError

FORMAT = 2
"""Version of the file."""

MARK = "planner-point: "
"""Begins the lines of a rank that are points: libraries may print too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What was measured; points of another machine are never joined with these."""

    processor: str
    cores: int
    torch: str
    device: str
    """"cpu", or the name of the GPU."""
    memory_bytes: int
    """Of the device; of the whole machine where that is a CPU."""
    num_sms: int
    """Multiprocessors of a GPU, 1 for a process of one thread."""

    ranks: int
    """Cores of a CPU, GPUs of the machine."""

    @property
    def words(self) -> str:
        """For sources: "2 cores of AMD EPYC, torch 2.13.0"."""
        host = f"{self.cores} cores of {self.processor}, torch {self.torch}"
        return host if self.device == "cpu" else f"{self.device}, {host}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How it was measured."""

    processes: int
    """Processes on each host, all measuring at once."""
    hosts: int
    quick: bool


Point = dict[str, Any]
"""A line of the file: "job", and what was found by it."""


class PointFile:
    """The points that are there, and the way to add more."""

    def __init__(self, path: Path, machine: Machine, settings: Settings) -> None:
        """Read what is there.

        Raises:
            ProfileError: It holds points of another machine, or was measured otherwise.
        """
        self.path = path
        self.points: list[Point] = []
        head = {"format": FORMAT, "machine": asdict(machine), "settings": asdict(settings)}
        lines = _whole_lines(path) if path.exists() else []
        if lines and lines[0] != head:
            raise ProfileError(
                f"{path}: holds points of {_difference(lines[0], head)}",
                hint="remove it, or begin anew with --force",
            )
        self.points = lines[1:]
        text = "".join(json.dumps(line) + "\n" for line in (head, *self.points))
        draft = path.with_name(f".{path.name}-{os.getpid()}.tmp")  # drops half a line at the end
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)

    @property
    def done(self) -> list[str]:
        """Jobs that need not run again."""
        return [point["job"] for point in self.points]

    def add(self, point: Point) -> None:
        """Append a point."""
        self.points.append(point)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(point) + "\n")

    def of(self, kind: str) -> Iterator[Point]:
        """Points of one kind."""
        return (point for point in self.points if point["kind"] == kind)


def _whole_lines(path: Path) -> list[Any]:
    """All lines up to the first that is not whole."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found


def _difference(found: object, wanted: dict[str, Any]) -> str:
    """Say in what two heads differ."""
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        return "another format"
    for part in ("machine", "settings"):
        for key, value in wanted[part].items():
            other = found.get(part, {}).get(key)
            if other != value:
                return f"another measurement: {key} was {other!r}, now it is {value!r}"
    return "another measurement"


def processor_name() -> str:
    """The model of this machine's processor."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
