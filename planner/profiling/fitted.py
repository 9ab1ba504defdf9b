"""Turns the points that were measured into what planning needs of a machine."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from planner.profiling.document import Writer, cluster_text, device_text
from planner.profiling.host_fit import fit_script
from planner.profiling.links import LinkFound, fit_links
from planner.profiling.op_fit import DeviceFit, fit_device
from planner.profiling.points import Machine, Point, PointFile, Settings


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
