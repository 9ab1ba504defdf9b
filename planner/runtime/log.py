"""What a step reports."""

import json
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from .processes import is_first_rank, print_once


@dataclass(slots=True)
class Log:
    """Reports steps on the screen and as JSON lines, from rank 0."""

    file: Path | None
    """Gets one JSON object per step, None for the screen alone."""
    tokens_per_step: int
    """Tokens (samples where there are none) per step."""
    device: torch.device
    """Whose memory is reported."""
    _started_s: float = 0.0

    def start_step(self) -> None:
        """Take the time at which a step begins."""
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
        if is_first_rank():
            self._report(step, loss_value, norm_value, step_time_s, memory_bytes)
        return bool(any_stops)

    def _report(
        self, step: int, loss: float, grad_norm: float, step_time_s: float, memory_bytes: float
    ) -> None:
        row = {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "step_time_s": step_time_s,
            "tokens_per_s": self.tokens_per_step / step_time_s,
            "peak_memory_bytes": int(memory_bytes),
        }
        sys.stdout.write(
            f"step {step}: loss {loss:.6f}, grad norm {grad_norm:.4f}, "
            f"{step_time_s * 1e3:.0f} ms, {row['tokens_per_s']:.0f} tokens/s, "
            f"peak {memory_bytes / 2**30:.2f} GiB\n"
        )
        sys.stdout.flush()
        self._write(row, afresh=step == 1)

    def report(self, step: int, values: Mapping[str, float]) -> None:
        """Report what was evaluated after a step."""
        words = ", ".join(f"{name} {value:.6f}" for name, value in values.items())
        print_once(f"step {step}: {words}")
        if is_first_rank():
            self._write({"step": step, **values}, afresh=False)

    def _write(self, row: Mapping[str, float], *, afresh: bool) -> None:
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("w" if afresh else "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory allocated on the GPU, or the peak resident size of the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
