"""Starts the ranks of one host with torchrun's own launcher, each a fork of this process on a CPU.

    python -m planner.profiling.node TASK

TASK is JSON: what ``planner.profiling.rank.Task`` has, the number of hosts, which of them this is,
and where they meet.
"""

import json
import subprocess
import sys

RESIDUE = "planner.profiling.residue"


def run(words: str) -> None:
    """Start the ranks and wait for them."""
    asked = json.loads(words)
    hosts, host, endpoint = asked.pop("hosts"), asked.pop("host"), asked.pop("endpoint")
    # It measures no time: it runs while this process imports torch, and ends before ranks begin.
    wants_residue = asked["device"] == "cpu" and host == 0
    residue = _started(RESIDUE) if wants_residue else None
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from planner.profiling.rank import Task, main

    asked["residue"] = None if residue is None else _told_by(residue)
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


def _started(module: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-m", module]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _told_by(process: subprocess.Popen[str]) -> dict[str, float]:
    told, _ = process.communicate()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    found: dict[str, float] = json.loads(told)
    return found


if __name__ == "__main__":
    run(sys.argv[1])
