"""Ranks of a host, as ``plan profile`` starts them."""

import json
import subprocess
import sys

import pytest

from planner.profiling.points import MARK


@pytest.mark.run
@pytest.mark.parametrize("host", [pytest.param(0, marks=pytest.mark.bench), 1])
def test_memory_beyond_tensors_is_that_of_the_first_host(host, tmp_path):
    """Another host's ranks would measure it beside those of the first, which time ops."""
    task = {
        **{"processes": 1, "device": "cpu", "quick": True, "done": [], "limit_s": 1e-4},
        **{"hosts": 1, "host": host, "endpoint": "localhost:0"},
    }
    command = [sys.executable, "-W", "ignore", "-m", "planner.profiling.node", json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    lines = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    points = [json.loads(line) for line in lines]
    assert {"overhead", "op", "script", "dispatch", "update", "residue"} == {
        each["kind"] for each in points
    }
    (residue,) = (each for each in points if each["kind"] == "residue")
    if host == 0:
        assert 2**26 < residue["used_bytes"] < 2**32
        assert 0 <= residue["allocator_share"] < 10
        assert residue["wall_s"] < 0.5  # it was measured before the ranks began
    else:
        assert "used_bytes" not in residue
