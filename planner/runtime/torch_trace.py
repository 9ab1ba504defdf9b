"""A trace of a few steps by torch's profiler, of which ``plan compare`` shows the parts.

One file for each rank, as chrome://tracing and Perfetto read it.
"""

import json
import os
from contextlib import ExitStack
from pathlib import Path

from torch.profiler import ProfilerAction, profile, record_function, schedule

STEP = "plan: step"
UPDATE = "plan: update"
"""Names of the spans of a step, and of all that follows its backward passes."""


class StepTrace:
    """Traces steps 4 to 6 of a run."""

    def __init__(self, folder: Path, plan: str) -> None:
        """Begin; the folder gets a file of each rank, which names the plan."""
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
