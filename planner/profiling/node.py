"""Starts the ranks of one host with torchrun's own launcher, each a fork of this process on a CPU.

    python -m planner.profiling.node TASK

TASK is JSON: what ``planner.profiling.rank.Task`` has, the number of hosts, which of them this is,
and where they meet.
"""

import json
import sys

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from planner.profiling.rank import Task, main


def run(words: str) -> None:
    """Start the ranks and wait for them."""
    asked = json.loads(words)
    hosts, host, endpoint = asked.pop("hosts"), asked.pop("host"), asked.pop("endpoint")
    task = Task(**{**asked, "done": tuple(asked["done"])})
    config = LaunchConfig(
        min_nodes=hosts,
        max_nodes=hosts,
        nproc_per_node=task.processes,
        run_id="planner-profile",
        rdzv_backend="c10d" if hosts == 1 else "static",
        rdzv_endpoint=endpoint,
        rdzv_configs={} if hosts == 1 else {"rank": host, "timeout": 120},
        max_restarts=0,
        monitor_interval=0.1,
        start_method="fork" if task.device == "cpu" else "spawn",
    )
    elastic_launch(config, main)(task)


if __name__ == "__main__":
    run(sys.argv[1])
