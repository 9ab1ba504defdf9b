"""A rank that is gone ends the others at once; ranks that leave in good order end nobody."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.run

SCRIPT = """
import fcntl, json, os, signal, sys, time
from pathlib import Path
import torch.distributed as dist
from planner.runtime.lost_ranks import lost_ranks_end_all

def fork(folder):
    forks = {}
    for end in ("leave", "forget", "raise", "0", "2"):
        for rank in range(3):
            forks[f"{end} {rank}"] = os.fork()
            if not forks[f"{end} {rank}"]:
                return end, rank
    codes = {key: os.waitpid(fork, 0)[1] for key, fork in forks.items()}
    print(json.dumps({key: os.waitstatus_to_exitcode(code) for key, code in codes.items()}))
    os._exit(0)

folder = Path(sys.argv[1])
end, rank = fork(folder)
signal.alarm(90)
errors = (folder / f"{end} {rank}").open("w")
os.dup2(errors.fileno(), 2)
fcntl.flock(errors, fcntl.LOCK_EX)  # until this process has ended
dist.init_process_group("gloo", init_method=f"file://{folder}/{end}", rank=rank, world_size=3)
watch = lost_ranks_end_all()
if end in ("forget", "raise"):
    watch.__enter__()  # and never left, as a loop does that forgets close()
    dist.barrier()
    dist.destroy_process_group()
    if end == "raise":
        if rank == 2:
            raise ValueError
        time.sleep(300)
    if rank != 2:  # 2 ends first, then 0, then 1
        fcntl.flock((folder / f"{end} {(2, 0)[rank]}").open(), fcntl.LOCK_SH)
        time.sleep(0.5)
    sys.exit()
with watch:
    dist.barrier()
    if end != "leave":
        if rank == int(end):
            os._exit(9)
        time.sleep(300)
    dist.barrier()
time.sleep(rank)  # the others have left long before
os._exit(0)
"""
WORLD = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}


def test_ranks_end_where_one_is_gone(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env={**os.environ, **WORLD},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    codes = json.loads(done.stdout)
    for rank in range(3):
        assert codes[f"leave {rank}"] == 0
        assert codes[f"forget {rank}"] == 0, (tmp_path / f"forget {rank}").read_text()
        assert codes[f"raise {rank}"] == 1
        assert codes[f"0 {rank}"] == (9 if rank == 0 else 1)
        assert codes[f"2 {rank}"] == (9 if rank == 2 else 1)
    gone = "rank 2 is gone, which ends the training"
    assert gone in (tmp_path / "2 0").read_text()
    assert gone in (tmp_path / "raise 0").read_text()
    assert "gone" not in (tmp_path / "2 1").read_text() + (tmp_path / "0 1").read_text()
