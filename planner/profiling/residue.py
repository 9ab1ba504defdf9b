"""What a rank that trains takes of a host's memory beyond its tensors.

    python -m planner.profiling.residue

prints it in bytes. It runs in a process of its own, as ranks of a script are: a fork counts no
pages of libraries that its parent alone has used.
"""

import ctypes
import gc
import os
import resource
import sys
from pathlib import Path

import torch
from torch import nn

from planner.profiling.host_model import Block
from planner.profiling.host_terms import SHAPES, script_step
from planner.runtime.log import peak_memory_bytes
from planner.runtime.processes import process_group

WIDTH = 256
"""Of a block whose products are as large as libraries have buffers for."""

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
"""A host is measured, also where it has GPUs."""


def residue_bytes() -> int:
    """Return the resident memory of this process once it has trained and its tensors are freed.

    That is what is imported until the first step has ended, and the buffers that libraries of
    kernels keep, which products and convolutions of some size make. Where the system tells only
    the peak, it is that.
    """
    with process_group(1, timeout_s=60.0) as device:
        assert device.type == "cpu"
        step = script_step(**SHAPES[0], device=device)
        for _ in range(2):
            step()
        del step
    for module, given in (
        (Block(WIDTH, heads=8), torch.randn(16, 128, WIDTH)),
        (nn.Conv2d(64, 64, 3, padding=1), torch.randn(8, 64, 32, 32)),
    ):
        torch.autograd.backward(module(given).sum())
    del module, given
    gc.collect()
    pages = Path("/proc/self/statm")
    if not pages.exists():
        return peak_memory_bytes(torch.device("cpu"))
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
    return int(pages.read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    for name in [each for each in os.environ if each.startswith("TORCHELASTIC_")]:
        del os.environ[name]  # rank 0 of a measurement starts it
    os.environ.update(ALONE | ON_CPU)
    sys.stdout.write(f"{residue_bytes()}\n")
    sys.stdout.flush()
    os._exit(0)  # threads of the group are not waited for
