"""How far a trace is, told while it runs."""

import time

from torch import Tensor, nn

from planner.graph.recording.recorder import Recorder
from planner.progress import PhaseEvent, ProgressCallback

TRACE_PHASE = "trace"
"""Name of the phase."""

FORWARD_SHARE = 0.3
"""Part of the time until the forward pass has ended, measured on Llama-3-405B."""

STEP_SHARE = 0.7
"""Part of the time until the backward pass has ended; the rest goes into the graph."""

INTERVAL_S = 0.1
"""Least time between two events."""


class TraceProgress:
    """Stands before a recorder's hooks for saved tensors and tells how far the step is.

    The forward pass is as far as modules have been called, the backward pass as far as what the
    forward pass saved has been taken back.
    """

    def __init__(self, recorder: Recorder, module: nn.Module, report: ProgressCallback) -> None:
        """Count the modules; nothing is told yet."""
        containers = (nn.ModuleList, nn.ModuleDict)
        self._recorder = recorder
        self._report = report
        self._num_modules = sum(not isinstance(each, containers) for each in module.modules())
        self._num_saved = 0
        self._num_taken = 0
        self._next_s = time.perf_counter() + INTERVAL_S

    def pack(self, tensor: Tensor) -> Tensor:
        """Count a saved tensor and pass it on."""
        self._num_saved += 1
        if self._num_taken == 0:
            done = len(self._recorder.calls) / self._num_modules
            self._tell("forward", FORWARD_SHARE * min(1.0, done))
        return self._recorder.pack(tensor)

    def unpack(self, tensor: Tensor) -> Tensor:
        """Count a saved tensor that comes back, and pass it on."""
        self._num_taken += 1
        done = self._num_taken / max(1, self._num_saved)
        backward_share = STEP_SHARE - FORWARD_SHARE
        self._tell("backward", FORWARD_SHARE + backward_share * min(1.0, done))
        return self._recorder.unpack(tensor)

    def end_step(self) -> None:
        """Tell that the step is recorded."""
        self._next_s = 0.0
        self._tell("dividing into blocks", STEP_SHARE)

    def _tell(self, pass_name: str, fraction: float) -> None:
        now_s = time.perf_counter()
        if now_s < self._next_s:
            return
        self._next_s = now_s + INTERVAL_S
        detail = f"{pass_name}, {len(self._recorder.ops):,} operators"
        self._report(
            PhaseEvent(phase=TRACE_PHASE, elapsed_s=None, fraction=fraction, detail=detail)
        )
