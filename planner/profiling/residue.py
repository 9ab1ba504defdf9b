"""What a rank that trains takes of a host's memory beyond its tensors, and beside them.

    python -m planner.profiling.residue

prints both as JSON. It runs in a process of its own, as ranks of a script are: a fork counts no
pages of libraries that its parent alone has used.
"""

import ctypes
import gc
import json
import os
import resource
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from planner.profiling.host_model import CLASSES, Block, TokenModel
from planner.profiling.host_terms import SHAPES, script_step
from planner.profiling.live_bytes import LiveStorages
from planner.runtime.log import peak_memory_bytes
from planner.runtime.processes import process_group
from planner.runtime.trees import Args, Function, Kwargs, Tree, tensors_of

WIDTH = 256
"""Of a block whose products are as large as libraries have buffers for."""

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
"""A host is measured, also where it has GPUs."""


MODELS = ((128, 4, 8, 128), (192, 3, 8, 96))
"""Width, blocks, batch and sequence of models: how well pieces fit depends on their sizes."""
STEPS = 5
"""Of training, in which the heap grows: pieces that are free do not fit what comes next."""


def residue() -> dict[str, float]:
    """Measure what this process takes beyond its tensors, and beside them.

    Returns:
        ``used_bytes``: Resident memory once it has trained and its tensors are freed. That is what
        is imported until the first step has ended, and the buffers that libraries of kernels keep,
        which products and convolutions of some size make. Where the system tells only the peak, it
        is that.
        ``allocator_share``: What the allocator holds beside live tensors when a step takes most,
        as a share of these, in the mean over some models.
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
    if not _PAGES.exists():
        return {"used_bytes": peak_memory_bytes(torch.device("cpu")), "allocator_share": 0.0}
    _trim()
    used_bytes = _resident_bytes()
    shares = [_allocator_share(*model) for model in MODELS]
    return {"used_bytes": used_bytes, "allocator_share": statistics.fmean(shares)}


_PAGES = Path("/proc/self/statm")


def _trim() -> None:
    """Give free memory back."""
    gc.collect()
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)


def _resident_bytes() -> int:
    return int(_PAGES.read_text().split()[1]) * resource.getpagesize()


def _allocator_share(width: int, blocks: int, batch: int, sequence: int) -> float:
    """Train a model: what this process has grown by, over the tensors that were alive."""
    _trim()
    before_bytes = _resident_bytes()
    model = TokenModel(width, blocks)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        loss: Tensor = model(torch.randint(CLASSES, (batch, sequence)))
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(STEPS):
        step()
    grown_bytes = _resident_bytes() - before_bytes  # a script gives nothing back
    with _LiveBytes() as seen:
        states = [value for each in optimizer.state.values() for value in each.values()]
        seen.count([*model.parameters(), *states])
        step()
    peak_bytes: int = seen.live.peak_bytes
    return max(0.0, grown_bytes / peak_bytes - 1)


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages of what ops return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = LiveStorages()

    def __torch_dispatch__(
        self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        out = func(*args, **(kwargs or {}))
        self.count(tensors_of(out))
        return out

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count these."""
        for tensor in tensors:
            self.live.see_storage(tensor.untyped_storage())


if __name__ == "__main__":
    for name in [each for each in os.environ if each.startswith("TORCHELASTIC_")]:
        del os.environ[name]  # rank 0 of a measurement starts it
    os.environ.update(ALONE | ON_CPU)
    sys.stdout.write(f"{json.dumps(residue())}\n")
    sys.stdout.flush()
    os._exit(0)  # threads of the group are not waited for
