"""Wall time and memory of the command, cold: ``make bench`` prints them."""

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CHILD = """
import resource, sys
from planner.cli.main import run
code = run(sys.argv[1:])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print("peak_kib", peak, file=sys.stderr)
sys.exit(code)
"""


@dataclass(frozen=True)
class Cold:
    """One run in a process of its own."""

    wall_s: float
    peak_mib: float


def run_cold(*arguments):
    start_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    wall_s = time.perf_counter() - start_s
    assert done.returncode == 0, done.stderr
    *_, peak_kib = done.stderr.split()
    cold = Cold(wall_s=wall_s, peak_mib=int(peak_kib) / 1024)
    words = " ".join(arguments)
    print(f"\nplan {words}: {cold.wall_s:.2f} s wall, {cold.peak_mib:.0f} MiB peak")
    return cold


@pytest.mark.bench
def test_help_is_instant():
    assert run_cold("--help").wall_s < 0.5


@pytest.mark.bench
def test_a_plan_for_an_8b_model_takes_seconds():
    cold = run_cold("examples/llama.py:llama_8b", "--gpus", "8", "--json")
    assert cold.wall_s < 12
    assert cold.peak_mib < 1024
