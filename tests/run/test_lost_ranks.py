"""A rank that is gone ends the others at once; ranks that leave in good order end nobody."""

import os
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.run

SCRIPT = """
import os, sys, time
import torch.distributed as dist
from planner.runtime.lost_ranks import lost_ranks_end_all
meeting, gone = sys.argv[1:]
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=3)
with lost_ranks_end_all():
    dist.barrier()
    if gone != "none":
        if rank == int(gone):
            os._exit(9)
        time.sleep(300)
    dist.barrier()
time.sleep(rank)  # the others have left long before
os._exit(0)
"""
WORLD = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}


def test_ranks_end_where_one_is_gone(tmp_path):
    started = {
        (gone, rank): subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path / gone), gone],
            env={**os.environ, **WORLD, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for gone in ("none", "0", "2")
        for rank in range(3)
    }
    begun_s = time.monotonic()
    messages = {key: process.communicate(timeout=120)[1] for key, process in started.items()}
    assert time.monotonic() - begun_s < 100  # and no sleep of 300
    codes = {key: process.returncode for key, process in started.items()}
    for rank in range(3):
        assert codes["none", rank] == 0, messages["none", rank]
        assert codes["0", rank] == (9 if rank == 0 else 1)
        assert codes["2", rank] == (9 if rank == 2 else 1)
    assert "rank 2 is gone, which ends the training" in messages["2", 0]
    assert "gone" not in messages["2", 1] + messages["0", 1]
