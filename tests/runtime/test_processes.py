"""What a step frees is not cleared anew by the system in the next one."""

import ctypes
import subprocess
import sys

import pytest

STEP = """
import ctypes, resource, torch
from planner.runtime.processes import keep_freed_memory
ctypes.CDLL(None).mallopt(-3, 2**17)  # M_MMAP_THRESHOLD: glibc raises it by what is freed first
if {kept}:
    keep_freed_memory()
faults = []
for _ in range(4):
    tensors = [torch.ones(2**20) for _ in range(8)]
    del tensors
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[-1] - faults[-2])
"""


def faults(*, kept):
    words = [sys.executable, "-c", STEP.format(kept=kept)]
    return int(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library")
def test_memory_that_is_freed_stays():
    """Pages that are cleared at once differ by system: only the two beside each other say it."""
    assert 10 * faults(kept=True) < faults(kept=False)
