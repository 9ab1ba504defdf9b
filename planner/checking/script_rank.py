"""A plan's script as one of its ranks: what workers do with it alike."""

import importlib.util
import json
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


def run_blocks_as_written(folder: Path) -> None:
    """Let nothing be compiled: torch.compile runs on no fake tensors."""
    if Path(folder, "runtime", "compiled.py").is_file():
        whole: Theirs = importlib.import_module("runtime.compiled")
        whole.compile_blocks = lambda part: None
    if Path(folder, "runtime", "split_compiled.py").is_file():
        recompute: Theirs = importlib.import_module("runtime.recompute")
        split: Theirs = importlib.import_module("runtime.split_compiled")
        split.compile_split_blocks = lambda part, axes, modes=(): recompute.recompute_activations(
            part, modes
        )


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


def answer_jobs(
    run: Callable[[Path, int, int, Sequence[DataRead]], dict[str, Any]],
    *,
    folder: str,
    planned: str,
    jobs: Sequence[tuple[int, int]],
    answers: str,
) -> None:
    """Run jobs, and write a line of JSON for each; the first that fails is the last.

    Args:
        run: Takes the folder, the rank, its microbatches and the data reads.
        folder: Of the script.
        planned: Data reads as JSON.
        jobs: Ranks, each with its number of microbatches.
        answers: File to write.
    """
    reads = [DataRead(*read) for read in json.loads(planned)]
    sys.path.insert(0, folder)
    warnings.simplefilter("ignore")
    with Path(answers).open("w", encoding="utf-8") as lines:
        for rank, number in jobs:
            try:
                found = run(Path(folder), rank, number, reads)
            except BaseException as error:
                trace = traceback.format_exc()
                found = {"error": f"{type(error).__name__}: {error}", "trace": trace}
            lines.write(json.dumps(found) + "\n")
            lines.flush()
            if "error" in found:
                break
