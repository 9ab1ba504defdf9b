"""Runs emitted scripts for one step each and writes the collectives that rank 0 took part in."""

import json
from collections import Counter
from pathlib import Path

import torch.distributed as dist
from driver import run_script
from torch.utils._python_dispatch import TorchDispatchMode


class Collectives(TorchDispatchMode):
    """Counts collectives on local tensors, those made inside ops of split tensors too."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind.__name__ in ("DTensor", "SplitTensor") for kind in types):
            return NotImplemented
        if func.namespace in ("_c10d_functional", "c10d") and "wait" not in func.name():
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def count_collectives(folders):
    """Leave ``collectives.json`` in the folder of each script."""
    for index, folder in enumerate(folders):
        with Collectives() as collectives:
            run_script(folder, ["--steps", "1"], index)
        if dist.get_rank() == 0:
            counts = json.dumps(collectives.counts, sort_keys=True)
            (Path(folder) / "collectives.json").write_text(counts)
