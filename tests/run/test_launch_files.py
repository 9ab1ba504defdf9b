"""The launch files beside a script: two nodes that are told to stop, go on, and lose a process."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from example_plans import SHALLOW_GPT, make_plan
from launch import write_script
from plan_factory import make_cluster

from planner.export.launch import launch_files

pytestmark = pytest.mark.run

LIMIT_S = 60


def start_nodes(folder, checkpoints, port, *options):
    """Start both nodes by the file of the folder, which knows nothing of this test."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "CHECKPOINTS": str(checkpoints),
        "HOST": "127.0.0.1",
        "PORT": str(port),
    }
    return [
        subprocess.Popen(
            ["bash", str(folder / "launch" / "torchrun.sh"), *options],
            env={**environment, "NODE_RANK": str(node)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for node in range(2)
    ]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def steps_in(log):
    return [json.loads(line)["step"] for line in log.read_text().splitlines() if '"step"' in line]


def children(process):
    """Processes under a process, the deepest last."""
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [each for child in found for each in (int(child), *children(int(child)))]


@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.bench), 3])
def test_two_nodes_stop_go_on_and_end_together(processes, tmp_path):
    """Three processes are two on the first node and one on the last."""
    plan = make_plan(SHALLOW_GPT, dp_shard=processes, global_batch_size=12, dtype="float32")
    folder = write_script(tmp_path / "plan", plan)
    cluster = make_cluster(num_gpus=processes, gpus_per_node=processes - 1)
    for name, text in launch_files(cluster).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    checkpoints = tmp_path / "shared"
    log = checkpoints / "log.jsonl"

    nodes = start_nodes(folder, checkpoints, free_port(), "--steps", "100000")
    wait_for(lambda: log.exists() and len(steps_in(log)) > 2)
    nodes[1].send_signal(signal.SIGTERM)
    assert [node.wait(LIMIT_S) for node in nodes] == [75, 75]
    last = steps_in(log)[-1]
    assert (checkpoints / f"step-{last:08d}").is_dir()
    assert (checkpoints / "stopped").exists()

    nodes = start_nodes(folder, checkpoints, free_port(), "--steps", "100000")
    wait_for(lambda: steps_in(log)[-1] > last + 1)
    assert last + 1 in steps_in(log)
    assert not (checkpoints / "stopped").exists()
    os.kill(children(nodes[0].pid)[-1], signal.SIGKILL)
    lost_s = time.monotonic()
    codes = [node.wait(LIMIT_S) for node in nodes]
    assert time.monotonic() - lost_s < 30
    assert 0 not in codes
    assert 75 not in codes
