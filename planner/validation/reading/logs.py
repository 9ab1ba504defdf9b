"""Reads the log of an emitted script as a table of one run."""

import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path

import pandas as pd

from planner.errors import RequestError
from planner.plan.serialize import SavedPlan, load_saved_plan
from planner.units import GIB
from planner.validation.reading.table import RunTable
from planner.validation.types import LoggedRun

WARM_UP_STEPS = 3
"""Steps at the beginning that are left out: memory is allocated and kernels are chosen in them."""

_PLAN_NAME = "plan.json"

Step = Mapping[str, object]
"""A line of a log."""


def is_log(file: Path) -> bool:
    """Whether a file is a log rather than a table: lines of JSON objects."""
    if file.suffix == ".jsonl":
        return True
    try:
        with file.open(encoding="utf-8") as stream:
            return stream.read(1) == "{"
    except (OSError, ValueError):
        return False


def read_log(file: Path, *, plan: Path | None, keep_going: bool) -> RunTable:
    """Read a log.

    Args:
        file: What the script wrote with ``--log-file``.
        plan: The plan.json of the run or its folder, None for the one beside the log or in the
            folder above it.
        keep_going: Pass over lines that are no JSON.

    Raises:
        PlannerError: The log or its plan cannot be read, or the log has no steps of the plan.
    """
    steps, notes = _steps(file, keep_going=keep_going)
    saved = load_saved_plan(_plan_file(file) if plan is None else plan)
    own = [step for step in steps if step.get("plan") == saved.digest]
    if len(own) < len(steps):
        notes.append(f"{len(steps) - len(own)} steps of another run left out")
    if steps and not own:
        raise _another_plan(file, steps, saved)
    timed = own[WARM_UP_STEPS:]
    if not timed:
        raise RequestError(
            f"{file}: {len(own)} steps, and the first {WARM_UP_STEPS} are warm-up",
            hint="Train for more steps: train.py --log-file LOG.jsonl --steps 20.",
        )
    notes.insert(0, f"median of {len(timed)} steps, the first {WARM_UP_STEPS} are warm-up")
    run = LoggedRun(
        row=0,
        saved=saved,
        step_time_s=statistics.median(_number(file, step, "step_time_s") for step in timed),
        peak_mem_bytes=max(_number(file, step, "peak_memory_bytes") for step in timed),
        is_allocated=timed[-1].get("peak_memory_of") == "allocated",
        notes=tuple(notes),
    )
    return RunTable(name=file.name, frame=_frame(run), runs=(run,), problems=())


def _steps(file: Path, *, keep_going: bool) -> tuple[list[Step], list[str]]:
    """Read the lines that report a step, and say what was left out."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise RequestError(
            f"{file}: the log cannot be read: {error}", hint="Give the path of a log or a table."
        ) from error
    found: list[Step] = []
    notes: list[str] = []
    for number, line in enumerate(lines, start=1):
        try:
            step = json.loads(line)
        except ValueError as error:
            if number < len(lines) and not keep_going:
                raise RequestError(
                    f"{file}: line {number} is no JSON: {error}",
                    hint="Mend it, or pass over such lines with --keep-going.",
                ) from error
            notes.append(f"line {number} is cut off, left out")
            continue
        if isinstance(step, dict) and "step_time_s" in step:
            found.append(step)
    return found, notes


def _plan_file(log: Path) -> Path:
    """Find the plan of a log."""
    places = list(_places(log.resolve()))
    for place in places:
        if place.exists():
            return place
    raise RequestError(
        f"{log}: there is no {_PLAN_NAME} beside it or in the folder above",
        hint="Say where the plan of this run is: --plan DIR.",
    )


def _places(log: Path) -> Iterator[Path]:
    for folder in (log.parent, log.parent.parent):
        yield folder / _PLAN_NAME


def _another_plan(file: Path, steps: list[Step], saved: SavedPlan) -> RequestError:
    """Say whose steps a log has."""
    names = sorted({str(step["plan"]) for step in steps if "plan" in step})
    if not names:
        return RequestError(
            f"{file}: its steps name no plan: they are of one process (--reference) or of another "
            "dtype than the plan's",
            hint="Give the log of a run of the plan as it is.",
        )
    return RequestError(
        f"{file}: its steps are of the plan {', '.join(names)}, and {saved.file} is the plan "
        f"{saved.digest}",
        hint="Name the plan of this run (of `plan validate` and `plan calibrate`: --plan DIR).",
    )


def _number(file: Path, step: Step, name: str) -> float:
    value = step.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise RequestError(
            f"{file}: step {step.get('step')}: {name} is {value!r}, no number above 0",
            hint="Give the log as the script wrote it.",
        )
    return float(value)


def _frame(run: LoggedRun) -> pd.DataFrame:
    """The run as a row of a table, as far as it is scored."""
    plan, model = run.saved.plan, run.saved.model
    return pd.DataFrame(
        {
            "model": [model.name],
            "num_gpus": [run.num_gpus],
            "global_batch": [plan.global_batch_size],
            "seq_len": [model.seq_len or 1],
            "step_time_s": [run.step_time_s],
            "peak_mem_gib": [run.peak_mem_bytes / GIB],
        }
    )
