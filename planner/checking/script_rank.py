"""A plan's script as one of its ranks: what workers do with it alike."""

import importlib.util
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from planner.runtime.data import drawn_microbatches
from planner.runtime.known_data import DataRead

Theirs: TypeAlias = Any
"""A module, function or object of the script."""


def forget_runtime() -> None:
    """Let the next script import the modules beside it, not those of the one before."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "runtime"]:
        del sys.modules[name]


def share_experts_evenly(folder: Path) -> None:
    """Let as many rows go to each rank that shares experts, as plans take it."""
    if Path(folder, "runtime", "experts.py").is_file():
        experts: Theirs = importlib.import_module("runtime.experts")
        experts.rows_by_rank = experts.even_rows


def keep_inputs_nowhere(folder: Path) -> None:
    """Let what lies in host memory between forward and backward take none of the device's."""
    if Path(folder, "runtime", "host_inputs.py").is_file():
        inputs: Theirs = importlib.import_module("runtime.host_inputs")
        inputs.on_host = lambda tensor: torch.empty_like(tensor, device="meta")
        inputs.on_device = lambda kept, device: torch.empty_like(kept, device=device)


def load_script(folder: Path) -> Theirs:
    """Import a folder's ``train.py``."""
    spec = importlib.util.spec_from_file_location("train", folder / "train.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def drawn_batch(script: Theirs, data_parallel_rank: int) -> Theirs:
    """Return a step's microbatches of the model file's ``example_batch``."""
    size = script.MICROBATCH_SIZE * script.NUM_MICROBATCHES
    samples = range(data_parallel_rank * size, (data_parallel_rank + 1) * size)
    return drawn_microbatches(script.MODEL, script.SEED, 0, samples, script.MICROBATCH_SIZE)


def answer_jobs(run: Callable[[Path, int, int, Sequence[DataRead]], dict[str, Any]]) -> None:
    """Run the jobs on the command line: FOLDER READS RANK:MICROBATCHES ...; print a line for each.

    READS are data reads as JSON, and each line is JSON too. The process ends with the first job
    that fails, or the last.

    Args:
        run: Takes the folder, the rank, its microbatches and the data reads.
    """
    folder, planned, *jobs = sys.argv[1:]
    reads = [DataRead(*read) for read in json.loads(planned)]
    sys.path.insert(0, folder)
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the model's code prints
    for job in jobs:
        rank, _, number = job.partition(":")
        try:
            found = run(Path(folder), int(rank), int(number), reads)
        except BaseException as error:
            found = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        answers.write(json.dumps({"job": job, **found}) + "\n")
        answers.flush()
        if "error" in found:
            break
    os._exit(0)  # the group's threads are not waited for
