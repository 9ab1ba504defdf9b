"""A rank of ``plan profile`` that runs one job of each kind between ranks."""

import json
from pathlib import Path

import torch
import torch.distributed as dist

from planner.profiling.rank import Rank, Task

KINDS = ("collective", "work", "pipeline")


def measure_between_ranks(folder, per_node):
    torch.set_num_threads(1)
    task = Task(processes=per_node, device="cpu", quick=True, done=(), limit_s=0.001)
    found = {}
    for job in Rank(task, torch.device("cpu")).jobs():
        if job.kind in KINDS and job.kind not in found:
            found[job.kind] = job.run()
    if dist.get_rank() == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
