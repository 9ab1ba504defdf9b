"""Runs an emitted script, notes the bytes of live tensors at the fullest moment of a step.

The first step is left out: optimiser states are made in it. The bytes at the start of the steps
after it are noted as well.

A storage is known by its identity and forgotten when it dies. DTensor asks for the shapes of its
results on fake tensors of the whole size: these have no memory and do not count.
"""

import gc
import importlib.util
import sys
import time
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

MEASURED_STEP = 2
NUM_STEPS = 3
LET_GO_S = 5.0


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that ops have made and that are still alive, and their peak."""

    def __init__(self):
        super().__init__()
        self.live = {}
        self.now = self.peak = 0

    def __enter__(self):
        resize = torch.UntypedStorage.resize_
        self._resize = resize

        def resized(storage, size):
            done = resize(storage, size)
            if storage._cdata in self.live:
                self.see(storage)
            return done

        torch.UntypedStorage.resize_ = resized
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self._resize
        return super().__exit__(*error)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if any(kind.__name__ in ("DTensor", "SplitTensor") for kind in types):
            return NotImplemented  # the ops on its local tensors follow
        out = op(*args, **(kwargs or {}))
        pytree.tree_map_only(torch.Tensor, self.see_tensor, out)
        return out

    def see_tensor(self, tensor):
        if is_traceable_wrapper_subclass(tensor):
            for name in tensor.__tensor_flatten__()[0]:
                self.see_tensor(getattr(tensor, name))
        elif not tensor.is_meta and not isinstance(tensor, FakeTensor):
            self.see(tensor.untyped_storage())

    def see(self, storage):
        key, size = storage._cdata, storage.nbytes()
        known = self.live.get(key)
        if known is not None and known[1]() is storage:
            self.now += size - known[0]
            known[0] = size
        else:
            if known is not None:
                self.now -= known[0]  # the address was used before
            entry = [size, None]
            entry[1] = weakref.ref(storage, lambda _: self.forget(key, entry))
            self.live[key] = entry
            self.now += size
        self.peak = max(self.peak, self.now)

    def forget(self, key, entry):
        if self.live.get(key) is entry:
            del self.live[key]
            self.now -= entry[0]


def track_peak(folder, arguments=()):
    """Leave ``peak-RANK`` in the folder of the script, from each rank that runs this."""
    sys.path.insert(0, folder)
    from runtime.parallel_model import ParallelModel

    tracker = LiveBytes()
    starts, peaks = [], []

    def measured(train):
        def run(*args):
            gc.collect()
            _until_let_go(tracker, starts[MEASURED_STEP - 1 :])
            tracker.peak = tracker.now
            starts.append(tracker.now)
            losses = train(*args)
            peaks.append(tracker.peak)
            if len(peaks) == NUM_STEPS:
                numbers = [peaks[MEASURED_STEP - 1], *starts[MEASURED_STEP - 1 :]]
                report = Path(folder) / f"peak-{dist.get_rank()}"
                report.write_text(" ".join(map(str, numbers)))
            return losses

        return run

    spec = importlib.util.spec_from_file_location("train", Path(folder) / "train.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for kind in (ParallelModel, *ParallelModel.__subclasses__()):
        kind._accumulate = measured(kind._accumulate)
    with tracker:
        script.main(["--steps", str(NUM_STEPS), *arguments])


def _until_let_go(tracker, starts):
    """Wait while the thread of a collective still holds what it sent, after the wait for it."""
    deadline_s = time.monotonic() + LET_GO_S
    while starts and tracker.now > starts[0] and time.monotonic() < deadline_s:
        time.sleep(0.01)
