"""Ranks of a plan's script in processes of their own, without the other ranks."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from planner.checking.failures import failure
from planner.checking.forks import Ended, forks_of
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
    """Module of the worker, whose ``answer`` takes what ``script_rank.answer_jobs`` does."""
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
        return self._run([jobs[i::count] for i in range(count)])

    def one_by_one(self, jobs: Sequence[Job]) -> dict[Job, Seen]:
        """Run each job in a fresh process that has the machine to itself.

        Raises:
            CheckError: One fails.
        """
        return {job: self._run([[job]])[job] for job in jobs}

    def _run(self, jobs_by_process: Sequence[Sequence[Job]]) -> dict[Job, Seen]:
        forks = forks_of(self.module, "answer", tuple(sorted(self.environment.items())))
        with TemporaryDirectory() as temporary:
            files = [Path(temporary, str(index)) for index in range(len(jobs_by_process))]
            calls = [
                {
                    "folder": str(self.folder),
                    "planned": self.reads,
                    "jobs": jobs,
                    "answers": str(file),
                }
                for jobs, file in zip(jobs_by_process, files, strict=True)
            ]
            ended = forks.call(calls)
            found: dict[Job, Seen] = {}
            for jobs, file, each in zip(jobs_by_process, files, ended, strict=True):
                found |= _answered(jobs, file, each)
            return found


def _answered(jobs: Sequence[Job], file: Path, ended: Ended) -> dict[Job, Seen]:
    """Read what a process has answered.

    Raises:
        CheckError: A job failed, or the process ended before it.
    """
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    answers = [json.loads(line) for line in lines]
    for (rank, _), answer in zip(jobs, answers, strict=False):
        if "error" in answer:
            raise failure(
                f"the script does not run, on rank {rank}: {answer['error']}", answer["trace"]
            )
    if len(answers) < len(jobs):
        raise failure(
            f"the script ended on rank {jobs[len(answers)][0]} with code {ended.code}",
            ended.printed,
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
