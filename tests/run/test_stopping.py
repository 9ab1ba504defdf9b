"""A request to stop, and a rank of the same node that is gone: torchrun sends SIGTERM for both."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from example_plans import SHALLOW_GPT, make_plan
from launch import torchrun, write_script

from planner.hardware.profiles import load_cluster

pytestmark = pytest.mark.run

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from planner.runtime.processes import StopRequest

folder, gone = Path(sys.argv[1]), sys.argv[2] == "gone"
ranks = []
while len(ranks) < 2 and 0 not in ranks:
    ranks.append(os.fork())
if all(ranks):  # plays torchrun, which has waited for a process before it asks the others
    while not (folder / "ready").exists():
        time.sleep(0.05)
    if gone:
        os.kill(ranks[1], signal.SIGKILL)
        os.waitpid(ranks[1], 0)
    os.kill(ranks[0], signal.SIGTERM)
    code = os.waitstatus_to_exitcode(os.waitpid(ranks[0], 0)[1])
    os._exit(code)
rank = ranks.index(0)
signal.alarm(60)
world = {"init_method": f"file://{folder}/meeting", "rank": rank, "world_size": 2}
dist.init_process_group("gloo", **world)
stop = StopRequest()
if rank == 1:
    time.sleep(60)
(folder / "ready").touch()
if gone:
    os.read(os.pipe()[0], 1)  # no Python code runs here any more, as in a wait for a GPU
while not stop.asked:
    time.sleep(0.05)
os._exit(75)
"""


@pytest.mark.parametrize(("what", "code"), [("gone", 1), ("stop", 75)])
def test_a_rank_ends_at_once_only_where_another_is_gone(tmp_path, what, code):
    started_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), what], timeout=100, check=False
    )
    assert done.returncode == code
    assert time.monotonic() - started_s < 30


def test_torchrun_ends_a_node_where_a_rank_is_killed(tmp_path):
    """The script of one node has no connections of its own."""
    folder = tmp_path / "plan"
    cluster = load_cluster("h100-sxm", gpus=2)
    write_script(folder, make_plan(SHALLOW_GPT, dp_shard=2, dtype="float32"), cluster=cluster)
    assert not (folder / "runtime" / "lost_ranks.py").exists()
    log = tmp_path / "log.jsonl"
    command = [sys.executable, *torchrun(2), str(folder / "train.py"), "--steps", "100000"]
    launcher = subprocess.Popen([*command, "--log-file", str(log)], stderr=subprocess.DEVNULL)
    while not log.exists() or log.read_text().count("\n") < 2:
        time.sleep(0.1)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    first, *_ = map(int, children.read_text().split())
    os.kill(first, signal.SIGKILL)
    killed_s = time.monotonic()
    assert launcher.wait(timeout=60) == 1
    assert time.monotonic() - killed_s < 30
    assert json.loads(log.read_text().splitlines()[-1])["step"] < 100000
