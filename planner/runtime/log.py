"""What a step reports, beside what the plan says of it."""

import json
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .options import DTYPES, Options
from .processes import is_first_rank, print_once
from .torch_trace import StepTrace

GIB = 2**30

Row = dict[str, Any]
"""One line of the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the plan says of a step."""

    plan: str
    """Names the plan."""
    dtype: str
    """Compute dtype that it is for."""
    step_time_s: float
    """Predicted time."""
    peak_memory_bytes: int
    """Predicted memory of the fullest rank, reserve included."""
    reserve_bytes: int
    """What of it torch does not allocate: the context of a GPU, buffers of communication."""
    items_per_step: int
    """Tokens (samples where there are none) of a step."""
    item: str
    """"tokens" or "samples"."""
    flop_per_step: int
    """Model FLOPs of a step, recomputation not counted."""
    peak_flop_per_s: float | None = None
    """Peak of all devices in the compute dtype, None where it is not known."""


class Log:
    """Reports steps on the screen and as JSON lines, from rank 0."""

    def __init__(self, options: Options, expected: Expected, device: torch.device) -> None:
        """Begin; steps are traced where that is asked for.

        Args:
            options: Names the file that gets one JSON object per step.
            expected: What the plan says; runs on one process and in another dtype are not held to
                it.
            device: Whose memory is reported.
        """
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

        Args:
            step: Steps taken so far, this one included.
            loss: Mean loss over the global batch, before the step.
            grad_norm: Norm of the whole gradient before clipping.
            stops: This rank was asked to stop.

        Returns:
            Whether any rank was asked to stop, the same on all.
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
        if is_first_rank():
            row |= self._measured(step_time_s, int(memory_bytes))
            print_once(_words(row, self._expected.item))
            self._write(row, afresh=step == 1)
        return bool(any_stops)

    def report(self, step: int, values: Mapping[str, float]) -> None:
        """Report what was evaluated after a step, in a row of its own."""
        words = ", ".join(f"{name} {value:.6f}" for name, value in values.items())
        print_once(f"step {step}: {words}")
        if is_first_rank():
            self._write({"step": step, **values}, afresh=False)

    def _measured(self, step_time_s: float, memory_bytes: int) -> Row:
        expected = self._expected
        row: Row = {
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
        row["predicted_step_time_s"] = expected.step_time_s
        row["predicted_peak_memory_bytes"] = expected.peak_memory_bytes - reserve_bytes
        row["peak_memory_of"] = "allocated" if is_gpu else "resident"
        row["plan"] = expected.plan
        return row

    def _write(self, row: Row, *, afresh: bool) -> None:
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("w" if afresh else "a", encoding="utf-8") as stream:
                stream.write(json.dumps(row) + "\n")


def _words(row: Row, item: str) -> str:
    """Say a row in one line: what was measured, and in brackets what was predicted."""
    words = [
        f"step {row['step']}: loss {row['loss']:.6f}",
        f"grad norm {row['grad_norm']:.4f}",
        f"{_beside(row, 'step_time_s', 1e-3, '.0f')} ms",
        f"{row[f'{item}_per_s']:.0f} {item}/s",
        f"MFU {row['mfu']:.1%}" if "mfu" in row else "",
        f"peak {_beside(row, 'peak_memory_bytes', GIB, '.2f')} GiB",
    ]
    return ", ".join(filter(None, words))


def _beside(row: Row, name: str, unit: float, form: str) -> str:
    """Write a number, and the predicted one beside it: "350 (predicted 199)"."""
    predicted = row.get(f"predicted_{name}")
    return f"{row[name] / unit:{form}}" + (
        f" (predicted {predicted / unit:{form}})" if predicted is not None else ""
    )


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory allocated on the GPU, or the peak resident size of the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
