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


@dataclass(slots=True)
class Log:
    """Reports steps on the screen and as JSON lines, from rank 0."""

    options: Options
    """Names the file that gets one JSON object per step."""
    expected: Expected
    """What the plan says; runs on one process and in another dtype are not held to it."""
    device: torch.device
    """Whose memory is reported."""
    _started_s: float = 0.0
    _trace: StepTrace | None = None

    def __post_init__(self) -> None:
        """Trace steps where that is asked for."""
        if self.options.torch_trace is not None:
            self._trace = StepTrace(self.options.torch_trace, self.expected.plan)

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
        loss_value, norm_value = loss.item(), grad_norm.item()  # waits for the device
        seen = [
            time.perf_counter() - self._started_s,
            float(peak_memory_bytes(self.device)),
            float(stops),
        ]
        worst = torch.tensor(seen, dtype=torch.float64, device=self.device)
        if dist.is_initialized():
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        step_time_s, memory_bytes, any_stops = worst.tolist()
        if self._trace is not None:
            self._trace.end_step()
        if is_first_rank():
            seen_values = {"step": step, "loss": loss_value, "grad_norm": norm_value}
            self._report({**seen_values, **self._measured(step_time_s, int(memory_bytes))})
        return bool(any_stops)

    def _measured(self, step_time_s: float, memory_bytes: int) -> Row:
        expected = self.expected
        measured: Row = {
            "step_time_s": step_time_s,
            f"{expected.item}_per_s": expected.items_per_step / step_time_s,
            "peak_memory_bytes": memory_bytes,
        }
        is_planned = self.options.dtype == DTYPES[expected.dtype] and not self.options.reference
        if not is_planned:
            return measured
        if expected.peak_flop_per_s is not None:
            measured["mfu"] = expected.flop_per_step / step_time_s / expected.peak_flop_per_s
        is_gpu = self.device.type == "cuda"
        return {
            **measured,
            "predicted_step_time_s": expected.step_time_s,
            "predicted_peak_memory_bytes": expected.peak_memory_bytes
            - (expected.reserve_bytes if is_gpu else 0),
            "peak_memory_of": "allocated" if is_gpu else "resident",
            "plan": expected.plan,
        }

    def _report(self, row: Row) -> None:
        sys.stdout.write(f"{_words(row, self.expected.item)}\n")
        sys.stdout.flush()
        self._write(row, afresh=row["step"] == 1)

    def report(self, step: int, values: Mapping[str, float]) -> None:
        """Report what was evaluated after a step, in a row of its own."""
        words = ", ".join(f"{name} {value:.6f}" for name, value in values.items())
        print_once(f"step {step}: {words}")
        if is_first_rank():
            self._write({"step": step, **values}, afresh=False)

    def _write(self, row: Row, *, afresh: bool) -> None:
        file = self.options.log
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("w" if afresh else "a", encoding="utf-8") as stream:
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
    found = [row[each] for each in (name, f"predicted_{name}") if each in row]
    shown = [f"{float(value) / unit:{form}}" for value in found]
    return shown[0] if len(shown) == 1 else f"{shown[0]} (predicted {shown[1]})"


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory allocated on the GPU, or the peak resident size of the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
