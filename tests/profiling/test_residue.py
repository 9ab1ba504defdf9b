"""What a rank takes beyond tensors is more than importing torch, and holds none of its tensors."""

import json
import subprocess
import sys

import pytest
import torch

from planner.profiling.live_bytes import LiveStorages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

RESIDENT = "int(open('/proc/self/statm').read().split()[1]) * resource.getpagesize()"


def told(*words):
    done = subprocess.run([sys.executable, *words], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def test_a_rank_takes_more_than_an_import_of_torch(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "3")  # as a rank of a measurement has them
    bare = told("-c", f"import resource, torch; print({RESIDENT})")
    found = told("-m", "planner.profiling.residue")
    assert bare + 2**25 < found["used_bytes"] < bare + 2**28
    assert 0.05 < found["allocator_share"] < 1


def test_storages_that_are_alive_count_once_and_as_large_as_they_are():
    live = LiveStorages()
    first, second = torch.zeros(1000), torch.zeros(500)
    assert live.see_storage(first.untyped_storage())
    assert live.see_storage(second.untyped_storage())
    assert not live.see_storage(first[10:].untyped_storage())
    assert live.now_bytes == live.peak_bytes == 6000
    del first
    assert live.now_bytes == 2000
    second.untyped_storage().resize_(100)
    assert not live.see_storage(second.untyped_storage())
    assert (live.now_bytes, live.peak_bytes) == (100, 6000)
