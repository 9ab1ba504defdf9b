"""Runs the sampled layouts of models on emulated clusters, and keeps what they took.

The scripts of one model start once on all clusters with the same hosts, whose links change under
them. On each cluster a step settles, and ``TIMED_STEPS`` follow, the layouts in turn.
"""

import json
import os
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from layouts import Layouts, Task
from network import Network, emulated, shape
from paced import PacedRun, RunFailedError, paced_runs

TIMED_STEPS = 5
FIRST_STEPS = 1
"""Before the first cluster: memory is allocated in them."""
SETTLING_STEPS = 1
"""On each cluster: connections find the rate of their new link."""

AT_ONCE = {2: 20, 4: 12}
"""Layouts that are alive at the same time, by ranks."""

CLUSTERS = {
    "pair": Network(hosts=1, ranks_per_host=2, inside_mbit_per_s=4000, between_mbit_per_s=4000),
    "two-hosts": Network(hosts=2, ranks_per_host=1, inside_mbit_per_s=500, between_mbit_per_s=500),
    "two-far-hosts": Network(
        hosts=2, ranks_per_host=1, inside_mbit_per_s=50, between_mbit_per_s=50
    ),
    "quad": Network(hosts=1, ranks_per_host=4, inside_mbit_per_s=2000, between_mbit_per_s=2000),
    "two-pairs": Network(hosts=2, ranks_per_host=2, inside_mbit_per_s=4000, between_mbit_per_s=200),
    "four-hosts": Network(hosts=4, ranks_per_host=1, inside_mbit_per_s=400, between_mbit_per_s=400),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """One layout on one cluster."""

    model: str
    cluster: str
    folder: str
    """Of its plan, below the work folder."""
    why: str
    """"pick", "rule of thumb", "random" or "again": a layout that runs twice at once."""
    step_times_s: tuple[float, ...]
    """Timed steps, of the slowest rank."""
    sent_bytes: tuple[int, ...]
    """A step of each rank, median."""
    memory_bytes: tuple[int, ...]
    """Peak resident memory of each rank, less what was resident at its start."""
    load: float
    """Of the machine over the last minute, at the end."""

    @property
    def step_time_s(self) -> float:
        """Median."""
        return statistics.median(self.step_times_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A script that waits to be run."""

    folder: Path
    why: str


def prepare(work: Path, task: Task, *, count: int, seed: int = 0) -> list[Sampled]:
    """Plan a task and write the scripts of its sample: the plan, the rule of thumb, others drawn
    at random until there are enough, and the first of these once more."""
    layouts = Layouts(task)
    root = work / f"{task.model}-{task.ranks}"
    found: list[Sampled] = []
    seen = set()
    for why, layout in (*layouts.known(), *(("random", each) for each in layouts.at_random(seed))):
        key = (layout.degrees, layout.schedule, layout.microbatch_size, layout.virtual_stages,
               layout.reshard_after_forward, layout.sequence_parallel, layout.stages)  # fmt: skip
        folder = root / f"{len(found):02d}"
        if key not in seen and layouts.write(layout, folder):
            seen.add(key)
            found.append(Sampled(folder=folder, why=why))
        if len(found) == count:
            break
    again = root / "again"
    shutil.copytree(found[0].folder, again, dirs_exist_ok=True)
    found.append(Sampled(folder=again, why="again"))
    entries = [(str(each.folder.relative_to(work)), each.why) for each in found]
    (root / "sample.json").write_text(json.dumps(entries))
    return found


def sampled(work: Path, model: str, ranks: int) -> list[Sampled]:
    """What ``prepare`` has written."""
    entries = json.loads((work / f"{model}-{ranks}" / "sample.json").read_text())
    return [Sampled(folder=work / folder, why=why) for folder, why in entries]


def measure(
    work: Path, model: str, sample: Sequence[Sampled], clusters: Sequence[str], out: Path
) -> None:
    """Run a sample on clusters of the same hosts, and append the figures to a file."""
    networks = [CLUSTERS[name] for name in clusters]
    ranks, per_host = networks[0].num_ranks, networks[0].ranks_per_host
    steps = FIRST_STEPS + len(clusters) * (SETTLING_STEPS + TIMED_STEPS)
    again = [each for each in sample if each.why == "again"]
    rest = [each for each in sample if each.why != "again"]
    first = replace(networks[0], inside_mbit_per_s=4000, between_mbit_per_s=4000)
    with emulated(first) as hosts:
        places = [hosts[rank // per_host] for rank in range(ranks)]
        for start in range(0, len(rest), AT_ONCE[ranks]):
            batch = [*rest[start : start + AT_ONCE[ranks]], *again]
            begun_s = time.perf_counter()
            shape(hosts, first)
            with paced_runs([each.folder for each in batch], places, steps=steps) as runs:
                alive = _stepped(list(zip(batch, runs, strict=True)), FIRST_STEPS)
                started_s = time.perf_counter() - begun_s
                loads = []
                for network in networks:
                    shape(hosts, network)
                    alive = _stepped(alive, SETTLING_STEPS)
                    alive = _stepped(alive, TIMED_STEPS)
                    loads.append(os.getloadavg()[0])
                for each, run in alive:
                    run.finish()
                    for index, name in enumerate(clusters):
                        _append(out, _figures(work, model, name, index, each, run, loads[index]))
            print(
                f"{model} on {', '.join(clusters)}: {len(alive)} scripts, start {started_s:.0f} s, "
                f"{time.perf_counter() - begun_s:.0f} s in all",
                flush=True,
            )


def _stepped(pairs: list[tuple[Sampled, PacedRun]], rounds: int) -> list[tuple[Sampled, PacedRun]]:
    """Take steps in turn; those that fail are told and left out."""
    for _ in range(rounds):
        alive = []
        for each, run in pairs:
            try:
                run.wait_ready()
                run.step()
            except RunFailedError as error:
                print(f"    FAILED {error}", flush=True)
                run.stop()
            else:
                alive.append((each, run))
        pairs = alive
    return pairs


def _figures(
    work: Path, model: str, cluster: str, index: int, each: Sampled, run: PacedRun, load: float
) -> MeasuredRun:
    first = FIRST_STEPS + index * (SETTLING_STEPS + TIMED_STEPS) + SETTLING_STEPS
    timed = run.steps[first : first + TIMED_STEPS]
    return MeasuredRun(
        model=model,
        cluster=cluster,
        folder=str(each.folder.relative_to(work)),
        why=each.why,
        step_times_s=tuple(step.step_time_s for step in timed),
        sent_bytes=tuple(
            round(statistics.median(sent))
            for sent in zip(*(step.sent_bytes for step in timed), strict=True)
        ),
        memory_bytes=run.memory_bytes,
        load=load,
    )


def _append(out: Path, run: MeasuredRun) -> None:
    with out.open("a") as file:
        file.write(json.dumps(asdict(run)) + "\n")


def read_runs(file: Path) -> list[MeasuredRun]:
    """What ``measure`` has appended."""
    if not file.exists():
        return []
    return [_run_of(json.loads(line)) for line in file.read_text().splitlines()]


def _run_of(row: dict[str, Any]) -> MeasuredRun:
    lists = {key: tuple(value) for key, value in row.items() if isinstance(value, list)}
    values: dict[str, Any] = {**row, **lists}
    return MeasuredRun(**values)
