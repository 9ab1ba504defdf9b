"""What a rank takes beyond tensors is more than importing torch, and holds none of its tensors."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

RESIDENT = "int(open('/proc/self/statm').read().split()[1]) * resource.getpagesize()"


def told(*words):
    done = subprocess.run([sys.executable, *words], check=True, capture_output=True, text=True)
    return int(done.stdout)


def test_a_rank_takes_more_than_an_import_of_torch(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "3")  # as a rank of a measurement has them
    bare = told("-c", f"import resource, torch; print({RESIDENT})")
    trained = told("-m", "planner.profiling.residue")
    assert bare + 2**25 < trained < bare + 2**28
