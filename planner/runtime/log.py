"""What a step reports beside what the plan says of it, and a trace of a few steps."""

import json
import os
import resource
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerAction, profile, record_function, schedule

from .options import DTYPES, Options
from .processes import is_first_rank, print_once

STEP, UPDATE = "plan: step", "plan: update"
"""Spans of a trace: a step, and all that follows its backward passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the plan says of a step."""

    plan: str  # names it
    dtype: str  # of compute
    step_time_s: float
    peak_memory_bytes: int  # of the fullest rank, reserve included
    reserve_bytes: int  # what of it torch does not allocate: GPU context, communication buffers
    items_per_step: int
    item: str  # "tokens", or "samples" where there are none
    flop_per_step: int  # of the model, recomputation not counted
    peak_flop_per_s: float | None = None  # of all devices in the dtype, where it is known


class Log:
    """Reports steps on the screen and as JSON lines, from rank 0."""

    def __init__(self, options: Options, expected: Expected, device: torch.device) -> None:
        """Begin; runs on one process and in another dtype are not held to what is expected."""
        self._file = options.log
        self._expected = expected
        self._device = device
        self._is_planned = options.dtype == DTYPES[expected.dtype] and not options.reference
        self._trace = StepTrace(options.torch_trace, expected.plan) if options.torch_trace else None
        self._started_s = 0.0

    def start_step(self) -> None:
        """Take the time at which a step begins."""
        if self._trace is not None:
            self._trace.start_step()
        self._started_s = time.perf_counter()

    def end_step(self, step: int, loss: Tensor, grad_norm: Tensor, *, stops: bool = False) -> bool:
        """Report a step: times and memory are those of the slowest and the fullest rank.

        Returns:
            Whether any rank was asked to stop (``stops``), the same on all.
        """
        row = {"step": step, "loss": loss.item(), "grad_norm": grad_norm.item()}  # waits for both
        step_time_s = time.perf_counter() - self._started_s
        seen = [step_time_s, float(peak_memory_bytes(self._device)), float(stops)]
        worst = torch.tensor(seen, dtype=torch.float64, device=self._device)
        if dist.is_initialized():
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        step_time_s, memory_bytes, any_stops = worst.tolist()
        if self._trace is not None:
            self._trace.end_step()
        row |= self._measured(step_time_s, int(memory_bytes))
        self._write(row, _words(row, self._expected.item), afresh=step == 1)
        return bool(any_stops)

    def report(self, step: int, values: Mapping[str, float]) -> None:
        """Report what was evaluated after a step, in a row of its own."""
        words = ", ".join(f"{name} {value:.6f}" for name, value in values.items())
        self._write({"step": step, **values}, f"step {step}: {words}")

    def _measured(self, step_time_s: float, memory_bytes: int) -> dict[str, Any]:
        expected = self._expected
        row: dict[str, Any] = {
            "step_time_s": step_time_s,
            f"{expected.item}_per_s": expected.items_per_step / step_time_s,
            "peak_memory_bytes": memory_bytes,
        }
        if not self._is_planned:
            return row
        if expected.peak_flop_per_s is not None:
            row["mfu"] = expected.flop_per_step / step_time_s / expected.peak_flop_per_s
        is_gpu = self._device.type == "cuda"
        reserve_bytes = expected.reserve_bytes if is_gpu else 0
        return row | {
            "predicted_step_time_s": expected.step_time_s,
            "predicted_peak_memory_bytes": expected.peak_memory_bytes - reserve_bytes,
            "peak_memory_of": "allocated" if is_gpu else "resident",
            "plan": expected.plan,
        }

    def _write(self, row: Mapping[str, Any], words: str, *, afresh: bool = False) -> None:
        print_once(words)
        if self._file is not None and is_first_rank():
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("w" if afresh else "a", encoding="utf-8") as stream:
                stream.write(json.dumps(row) + "\n")


def _words(row: Mapping[str, Any], item: str) -> str:
    """Say a row in one line: what was measured, and in brackets what was predicted."""

    def beside(name: str, unit: float, form: str) -> str:
        predicted = row.get(f"predicted_{name}")
        words = "" if predicted is None else f" (predicted {predicted / unit:{form}})"
        return f"{row[name] / unit:{form}}{words}"

    words = [
        f"step {row['step']}: loss {row['loss']:.6f}",
        f"grad norm {row['grad_norm']:.4f}",
        f"{beside('step_time_s', 1e-3, '.0f')} ms",
        f"{row[f'{item}_per_s']:.0f} {item}/s",
        f"MFU {row['mfu']:.1%}" if "mfu" in row else "",
        f"peak {beside('peak_memory_bytes', 2**30, '.2f')} GiB",
    ]
    return ", ".join(filter(None, words))


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory allocated on the GPU, or the peak resident size of the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class StepTrace:
    """Traces steps 4 to 6 of a run: a file of each rank, which names the plan."""

    def __init__(self, folder: Path, plan: str) -> None:
        """Begin."""
        self._folder = folder
        self._plan = plan
        steps = schedule(wait=2, warmup=1, active=3, repeat=1)
        self._profiler = profile(schedule=steps, on_trace_ready=self._write)
        self._profiler.start()
        self._span = ExitStack()

    def start_step(self) -> None:
        """Begin a step."""
        if self._profiler.current_action is not ProfilerAction.NONE:
            self._profiler.add_metadata_json("plan", json.dumps(self._plan))
        self._span.enter_context(record_function(STEP))

    def end_step(self) -> None:
        """End a step; the last one writes the file."""
        self._span.close()
        self._profiler.step()

    def _write(self, traced: profile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        traced.export_chrome_trace(str(self._folder / f"rank-{os.environ.get('RANK', '0')}.json"))
