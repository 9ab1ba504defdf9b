"""A trace of a few steps by torch's profiler, of which ``plan compare`` shows the parts.

One file for each rank, as chrome://tracing and Perfetto read it.
"""

import json
import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from torch.profiler import profile, record_function

STEPS_BEFORE = 3
"""Steps that warm up, and are not in the trace."""

TRACED_STEPS = 3

STEP = "plan: step"
UPDATE = "plan: update"
"""Names of the spans of a step, and of all that follows its backward passes."""


@dataclass(slots=True)
class StepTrace:
    """Traces steps 4 to 6 of a run."""

    folder: Path
    """Gets a file of each rank."""
    plan: str
    """Names the plan, in the file."""
    _steps: int = 0
    _profiler: profile | None = None
    _span: ExitStack = field(default_factory=ExitStack)

    def start_step(self) -> None:
        """Begin a step."""
        if self._steps == STEPS_BEFORE:
            self._profiler = profile()
            self._profiler.start()
            self._profiler.add_metadata_json("plan", json.dumps(self.plan))
        if self._profiler is not None:
            self._span.enter_context(record_function(STEP))

    def end_step(self) -> None:
        """End a step; the last one writes the file."""
        self._steps += 1
        if self._profiler is None:
            return
        self._span.close()
        if self._steps == STEPS_BEFORE + TRACED_STEPS:
            self._profiler.stop()
            self.folder.mkdir(parents=True, exist_ok=True)
            name = f"rank-{os.environ.get('RANK', '0')}.json"
            self._profiler.export_chrome_trace(str(self.folder / name))
            self._profiler = None
