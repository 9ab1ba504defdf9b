"""Runs a plan's script as some of its ranks on a real device: the worker of ``check --gpu``.

The script's own ``parallelize`` lays the model out, and the model that it returns takes steps on
the device, by its kernels and its allocator. Replaced is what needs the other ranks: collectives
return at once with numbers of this rank, what a stage receives and weights are random numbers.
"""

import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from planner.checking.fake_world import fake_group, numbers_received, stages_know_shapes
from planner.checking.script_rank import (
    Theirs,
    answer_jobs,
    drawn_batch,
    forget_runtime,
    load_script,
    share_experts_evenly,
)
from planner.codegen.undrawn import undrawn_model
from planner.runtime.known_data import DataRead

WARM_UP_STEPS, LEAST_STEPS, MOST_STEPS = 2, 3, 20
TIMED_S = 20.0
"""After so long no further step is timed."""

WEIGHT_SPREAD = 0.02
"""Standard deviation of weights: as large as those that training begins with, so that a GPU draws
the power that they take."""


def run_share(
    folder: Path, rank: int, num_microbatches: int, _: Sequence[DataRead] = ()
) -> dict[str, Any]:
    """Time steps of one rank.

    Args:
        folder: Folder of the script.
        rank: Rank.
        num_microbatches: Microbatches in place of the plan's.

    Returns:
        Median seconds of a step, the device, and of a GPU the most bytes allocated and all in use.
    """
    with share_of(folder, rank, num_microbatches) as (step, device):
        return timed_share(step, device, TIMED_S)


@contextmanager
def share_of(
    folder: Path, rank: int, num_microbatches: int
) -> Iterator[tuple[Callable[[], object], torch.device]]:
    """Lay one rank's part of the model out on its device.

    Args:
        folder: Folder of the script.
        rank: Rank.
        num_microbatches: Microbatches in place of the plan's.

    Yields:
        What takes a step, and the device.
    """
    forget_runtime()
    importlib.import_module("runtime.part")
    share_experts_evenly(folder)
    script = load_script(folder)
    script.NUM_MICROBATCHES = num_microbatches
    with fake_group(rank, script.WORLD_SIZE), stages_know_shapes(), numbers_received():
        trained = script.parallelize(undrawn_model(script.MODEL))
        for part in trained.parts:
            _draw_weights(part)
        batch = drawn_batch(script, trained.data_parallel_rank)
        yield lambda: trained.step_over(batch), trained.device


def timed_share(step: Callable[[], object], device: torch.device, timed_s: float) -> dict[str, Any]:
    """Time steps, as ``run_share``; after ``timed_s`` no further one is timed."""
    seconds = _timed(step, device, timed_s)
    return {"step_s": statistics.median(seconds), **_used(device)}


@torch.no_grad()
def _draw_weights(part: Theirs) -> None:
    for parameter in part.parameters():
        local: Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if parameter.ndim > 1:
            local.normal_(0.0, WEIGHT_SPREAD)
        else:
            local.fill_(1.0)
    part.has_weights = True


def _timed(step: Callable[[], object], device: torch.device, timed_s: float) -> list[float]:
    """Seconds of each step after warm-up; the device has done its work when a step is over."""
    seconds: list[float] = []
    for index in range(WARM_UP_STEPS + MOST_STEPS):
        begin_s = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if index >= WARM_UP_STEPS:
            seconds.append(time.perf_counter() - begin_s)
        if len(seconds) >= LEAST_STEPS and sum(seconds) >= timed_s:
            break
    return seconds


def _used(device: torch.device) -> dict[str, Any]:
    """The device, and what of its memory is used: of a CPU, nothing tells it of tensors alone."""
    if device.type != "cuda":
        return {"device": "one core of the CPU"}
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return {
        "device": torch.cuda.get_device_name(device),
        "allocated_bytes": torch.cuda.max_memory_allocated(device),
        "used_bytes": total_bytes - free_bytes,
    }


answer = partial(answer_jobs, run_share)
"""Answer jobs, in a process that does nothing else afterwards."""
