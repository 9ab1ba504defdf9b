"""Ranks of a plan's script in processes of their own, without the other ranks."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from planner.checking.failures import failure
from planner.plan.types import Plan

Job: TypeAlias = tuple[int, int]
"""A rank, and the microbatches that it runs in place of the plan's."""

Seen: TypeAlias = Mapping[str, Any]
"""What a worker says of one job."""

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Environment of workers that share the cores, or stand for ranks that do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """Runs jobs on the script of a folder."""

    module: str
    """Module of the worker, whose ``main`` takes FOLDER READS RANK:MICROBATCHES ..."""
    folder: Path
    """Folder of the script."""
    reads: str
    """What lines of the model read of data, as JSON."""
    environment: Mapping[str, str]
    """Environment variables beside those of this process."""

    def side_by_side(self, jobs: Sequence[Job]) -> dict[Job, Seen]:
        """Run jobs in as many processes as there are cores.

        Raises:
            CheckError: One fails.
        """
        count = min(len(jobs), os.cpu_count() or 1)
        with ThreadPoolExecutor(count) as pool:
            results = list(pool.map(lambda i: self._run(jobs[i::count]), range(count)))
        return {key: seen for each in results for key, seen in each.items()}

    def one_by_one(self, jobs: Sequence[Job]) -> dict[Job, Seen]:
        """Run each job in a fresh process that has the machine to itself.

        Raises:
            CheckError: One fails.
        """
        return {job: self._run([job])[job] for job in jobs}

    def _run(self, jobs: Sequence[Job]) -> dict[Job, Seen]:
        words = [f"{rank}:{number}" for rank, number in jobs]
        done = subprocess.run(
            [sys.executable, "-m", self.module, str(self.folder), self.reads, *words],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **self.environment},
        )
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        for answer in answers:
            if "error" in answer:
                rank = answer["job"].partition(":")[0]
                raise failure(
                    f"the script does not run, on rank {rank}: {answer['error']}", answer["trace"]
                )
        if len(answers) < len(jobs):
            raise failure(
                f"the script ended on rank {jobs[len(answers)][0]} with code {done.returncode}",
                done.stderr,
            )
        return dict(zip(jobs, answers, strict=True))


def reads_of(plan: Plan) -> str:
    """What lines of the model read of data by the plan, as workers take it."""
    found = [
        (read.file, read.line, tuple(zip(read.answers, read.repeats, strict=True)))
        for read in plan.data_reads
    ]
    return json.dumps(found)


def grown_evenly(seen: Sequence[float], numbers: Sequence[int], number: int) -> float:
    """What ``number`` microbatches come to where these, or two smaller numbers, were run.

    Args:
        seen: What was seen of the first and of the last of the numbers.
        numbers: Microbatches that were run, in rising order.
        number: Microbatches of the plan.
    """
    if len(numbers) == 1:
        return seen[-1]
    return seen[-1] + (seen[-1] - seen[0]) * (number - numbers[-1]) / (numbers[-1] - numbers[0])
