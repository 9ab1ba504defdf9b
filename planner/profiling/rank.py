"""One rank of a measurement: runs the jobs in lockstep with the others, rank 0 tells what it found.

Started by ``planner.profiling.node``. Each result is a line of JSON on rank 0's standard output.
"""

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from planner.profiling import host_terms
from planner.profiling.clock import Clock, Spread
from planner.profiling.collective_timing import (
    COLLECTIVES,
    Groups,
    groups_of,
    time_collective,
    time_work,
)
from planner.profiling.cpu_cases import cpu_cases
from planner.profiling.dispatch_terms import dispatched_ops, time_dispatch
from planner.profiling.kernel_cases import kernel_groups
from planner.profiling.kernels import KernelCase
from planner.profiling.points import MARK
from planner.runtime.processes import keep_freed_memory

QUICK_PAYLOADS = (2**14, 2**21)
PAYLOADS = (2**10, 2**13, 2**16, 2**19, 2**22, 2**25)
UPDATED_ELEMENTS = (2**16, 2**21)
PIPELINED = (1, 5)
"""Microbatches of a step for each stage."""
WORKED_S = (0.004, 0.016)
"""Work between two collectives: that of a block of a small model, and of a larger one."""

Found = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a rank is asked to do."""

    processes: int
    """Ranks on each host."""
    device: str
    quick: bool
    done: tuple[str, ...]
    """Jobs whose points are there."""
    limit_s: float
    """Time of one op."""
    residue: Found | None = None
    """What a rank takes of this host (``planner.profiling.residue``), where that is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Something to measure."""

    name: str
    kind: str
    run: Callable[[], Found]


class Rank:
    """Makes and runs the jobs."""

    def __init__(self, task: Task, device: torch.device) -> None:
        """Join the groups: all ranks make all of them, in the same order."""
        self._task = task
        self._clock = Clock(device)
        self._device = device
        self._groups: dict[Groups, tuple[dist.ProcessGroup, list[int]]] = {}
        world = dist.get_world_size()
        for groups in groups_of(world, task.processes, quick=task.quick):
            for members in groups.members(world):
                group = dist.new_group(members)
                if dist.get_rank() in members:
                    self._groups[groups] = (group, members)

    def jobs(self) -> Iterator[Job]:
        """List all jobs, those that tell most first."""
        yield Job(name="op overhead", kind="overhead", run=self._overhead)
        for index, case in enumerate(self._cases()):
            run = partial(self._op, case)
            yield Job(name=f"{index} {case.label}", kind="op", run=run)
        yield from self._works("after ops")
        payloads = QUICK_PAYLOADS if self._task.quick else PAYLOADS
        for groups, kind, payload in product(self._groups, COLLECTIVES, payloads):
            name = f"{kind} of {groups.num_ranks}, {groups.stride} apart, {payload} B"
            run = partial(self._collective, kind, payload, groups)
            yield Job(name=name, kind="collective", run=run)
        yield from self._works("after collectives")
        yield Job(name="script", kind="script", run=self._script)
        yield Job(name="dispatch", kind="dispatch", run=self._dispatch)
        if self._groups:
            nearest = self._nearest
            for number in (each * nearest.num_ranks for each in PIPELINED):
                run = partial(self._pipeline, number, nearest)
                yield Job(name=f"pipeline of {number}", kind="pipeline", run=run)
        for elements in UPDATED_ELEMENTS:
            run = partial(self._update, elements)
            yield Job(name=f"update {elements}", kind="update", run=run)
        yield from self._works("at the end")
        yield Job(name="memory beyond tensors", kind="residue", run=self._residue)

    @property
    def _nearest(self) -> Groups:
        return min(self._groups, key=lambda groups: (groups.stride, groups.num_ranks))

    def _works(self, when: str) -> Iterator[Job]:
        """Work between collectives, more than once: what else runs for a moment shows here."""
        if self._device.type == "cpu" and self._groups:
            for work_s in WORKED_S:
                run = partial(self._work, work_s)
                yield Job(name=f"work of {work_s} s, {when}", kind="work", run=run)

    def _cases(self) -> list[KernelCase]:
        if self._device.type == "cpu":
            return list(cpu_cases(quick=self._task.quick))
        groups = kernel_groups(smoke=False)
        return [case for group in groups for case in group[: 6 if self._task.quick else None]]

    def run(self, done: tuple[str, ...]) -> None:
        """Run what is not done; all ranks end each job together."""
        jobs = list(self.jobs())
        left = [job for job in jobs if job.name not in done]
        gc.freeze()  # what was imported need not be looked through after every job
        for number, job in enumerate(left):
            dist.barrier()
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            found = job.run()
            wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
            gc.collect()
            self._tell(
                {
                    "job": job.name,
                    "kind": job.kind,
                    "wall_s": round(wall_s, 6),
                    "cpu_s": round(cpu_s, 6),
                    "left": len(left) - number - 1,
                    **found,
                }
            )

    def _tell(self, point: Found) -> None:
        if dist.get_rank() == 0:
            sys.stdout.write(MARK + json.dumps(point) + "\n")
            sys.stdout.flush()

    def _overhead(self) -> Found:
        found = host_terms.op_overhead(self._clock)
        return {
            "calls": [asdict(call) for call in found["calls"]],
            **_over_ranks(found["spread"]),
        }

    def _op(self, case: KernelCase) -> Found:
        rows = []
        for row in case.measure(self._clock, self._task.limit_s):
            spread = Spread(
                median_s=row.seconds, p10_s=row.seconds_p10,
                p90_s=row.seconds_p90, repeats=row.repeats,
            )  # fmt: skip
            rows.append({**asdict(row), **_over_ranks(spread)})
        return {"rows": rows}

    def _collective(self, kind: str, payload: int, groups: Groups) -> Found:
        group, members = self._groups[groups]
        timed = time_collective(
            kind, payload, group, members, self._device, limit_s=12 * self._task.limit_s
        )
        return {
            "collective": kind,
            "ranks": groups.num_ranks,
            "nodes": groups.num_nodes(self._task.processes),
            "payload_bytes": payload,
            **_fields(timed.alone),
            **(asdict(timed.between) if timed.between is not None else {}),
        }

    @staticmethod
    def _work(work_s: float) -> Found:
        return asdict(time_work(work_s))

    def _script(self) -> Found:
        rows = []
        spreads = host_terms.time_scripts(self._device)
        for shape, spread in zip(host_terms.SHAPES, spreads, strict=True):
            ops = [asdict(call) for call in host_terms.scaled_ops(shape)]
            rows.append({"shape": shape, "calls": ops, **_over_ranks(spread)})
        return {"rows": rows}

    def _dispatch(self) -> Found:
        group = self._groups[self._nearest][0] if self._groups else None
        spreads = time_dispatch(group, self._device)
        ops = dispatched_ops(group, self._device)
        return {**ops, "ways": {way: _over_ranks(spread) for way, spread in spreads.items()}}

    def _pipeline(self, num_microbatches: int, groups: Groups) -> Found:
        spread = host_terms.time_pipeline(num_microbatches, *self._groups[groups], self._device)
        return {
            "microbatches": num_microbatches,
            "stages": groups.num_ranks,
            "calls": [asdict(call) for call in host_terms.block_ops()],
            **_over_ranks(spread, average=statistics.fmean),
        }

    def _update(self, elements: int) -> Found:
        step = host_terms.update_step(elements, self._device)
        spread = self._clock.time_call(step, limit_s=self._task.limit_s)
        return {"elements": elements, **_over_ranks(spread)}

    def _residue(self) -> Found:
        """What a rank takes of its device beyond tensors and beside them; rank 0 alone tells."""
        if self._device.type == "cuda":
            free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
            return {
                "used_bytes": total_bytes - free_bytes - torch.cuda.memory_reserved(self._device)
            }
        return self._task.residue or {}


def _fields(spread: Spread) -> Found:
    return {
        "seconds": spread.median_s,
        "seconds_p10": spread.p10_s,
        "seconds_p90": spread.p90_s,
        "repeats": spread.repeats,
    }


def _over_ranks(
    spread: Spread, *, average: Callable[[Iterable[float]], float] = statistics.median
) -> Found:
    """The times of all ranks in one: of the median rank where all do the same."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, _fields(spread))
    return {key: average(each[key] for each in every) for key in every[0]}


def main(task: Task) -> None:
    """Join the others and measure."""
    if task.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
        keep_freed_memory()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")  # no TF32
    dist.init_process_group("nccl" if task.device == "cuda" else "gloo")
    Rank(task, device).run(task.done)
    dist.barrier()
    dist.destroy_process_group()
