"""Runs the loops of examples/own_loop in processes of the driver; rank 0 leaves the losses."""

import importlib
import json
import sys
from pathlib import Path

import torch.distributed as dist

EXAMPLES = Path(__file__).parents[2] / "examples" / "own_loop"


def run_loops(jobs):
    """Run (script, arguments, file for the losses) one after the other."""
    sys.path.insert(0, str(EXAMPLES))
    for script, arguments, losses_file in jobs:
        for name in [name for name in sys.modules if name.partition(".")[0] == "runtime"]:
            del sys.modules[name]  # each plan has its own modules of it
        losses = importlib.import_module(script).main(arguments)
        if not dist.is_initialized() or dist.get_rank() == 0:
            Path(losses_file).write_text(json.dumps(losses))
