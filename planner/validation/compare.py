"""A plan beside what was measured of it, or beside another plan, part by part."""

from dataclasses import dataclass, fields
from pathlib import Path

from planner.cost.breakdown import CostBreakdown, MemoryBreakdown
from planner.errors import RequestError
from planner.framework.script import SCRIPT, framework_on_cluster
from planner.plan.serialize import SavedPlan, dump_json, encode, load_saved_plan
from planner.plan.types import Plan
from planner.validation.reading.logs import read_log
from planner.validation.reading.torch_trace import (
    TorchTrace,
    is_torch_trace,
    read_torch_trace,
)
from planner.validation.types import LoggedRun
from planner.version import VERSION

COMPARISON_SCHEMA_VERSION = 1
"""Version of the document; raised when a reader of the old form would misread the new one."""

STEP_PART = "step_time_s"
PEAK_PART = "peak_memory_bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a step, or of the memory."""

    name: str
    """``step_time_s``, ``peak_memory_bytes``, or a part of either."""
    first: float | None
    """By the plan, seconds or bytes; None where it is counted in another part."""
    second: float | None
    """Measured, or by the other plan; None where that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A plan beside something else."""

    plan: SavedPlan
    """The plan."""
    other: SavedPlan | None
    """The other plan, None beside a measurement."""
    parts: tuple[Part, ...]
    """Parts of the time, then of the memory."""
    notes: tuple[str, ...]
    """What was taken, and what is not known."""

    def to_json(self) -> str:
        """Write everything as JSON; equal answers give equal bytes."""
        return dump_json(
            {
                "schema_version": COMPARISON_SCHEMA_VERSION,
                "planner_version": VERSION,
                "plan": self.plan.digest,
                "other": None if self.other is None else self.other.digest,
                "parts": [encode(part) for part in self.parts],
                "notes": list(self.notes),
            }
        )


def compare_plans(plan: Path, other: Path) -> Comparison:
    """Hold two plans to each other: layouts, terms of the step, memory of the fullest rank.

    Raises:
        PlannerError: One of them cannot be read.
    """
    first, second = load_saved_plan(plan), load_saved_plan(other)
    pairs = [
        (STEP_PART, first.plan.costs.step_time_s, second.plan.costs.step_time_s),
        *_fields(CostBreakdown, first.plan.costs, second.plan.costs),
        (PEAK_PART, first.plan.peak_memory_bytes, second.plan.peak_memory_bytes),
        *_fields(MemoryBreakdown, _fullest(first.plan), _fullest(second.plan)),
    ]
    notes = [
        f"{words}: {ours} and {theirs}"
        for words, ours, theirs in (
            ("models", first.model.name, second.model.name),
            ("clusters", first.cluster.name, second.cluster.name),
            ("devices", first.cluster.num_gpus, second.cluster.num_gpus),
            ("samples per step", first.plan.global_batch_size, second.plan.global_batch_size),
            ("dtypes", first.plan.dtype, second.plan.dtype),
        )
        if ours != theirs
    ]
    return Comparison(
        plan=first,
        other=second,
        parts=tuple(Part(name=name, first=a, second=b) for name, a, b in pairs),
        notes=tuple(notes),
    )


def compare_measured(plan: Path, measured: Path) -> Comparison:
    """Hold a plan to the log of a run of its script, or to a trace of torch's profiler.

    Raises:
        PlannerError: One of them cannot be read, or the run is of another plan.
    """
    if is_torch_trace(measured):
        return _beside_trace(load_saved_plan(plan), read_torch_trace(measured), measured)
    (run,) = read_log(measured, plan=plan, keep_going=False).runs
    assert isinstance(run, LoggedRun)
    return _beside_log(run)


def _beside_log(run: LoggedRun) -> Comparison:
    planned = run.saved.plan
    counted_bytes = planned.peak_memory_bytes
    if run.is_allocated:
        counted_bytes -= _fullest(planned).reserve_bytes
    parts = [
        Part(name=STEP_PART, first=planned.costs.step_time_s, second=run.step_time_s),
        *(
            Part(name=field.name, first=getattr(planned.costs, field.name), second=None)
            for field in fields(CostBreakdown)
        ),
        Part(name=PEAK_PART, first=counted_bytes, second=run.peak_mem_bytes),
    ]
    told = "a log has the whole step alone; its parts are in a trace (train.py --torch-trace DIR)"
    return Comparison(plan=run.saved, other=None, parts=tuple(parts), notes=(*run.notes, told))


def _beside_trace(saved: SavedPlan, trace: TorchTrace, path: Path) -> Comparison:
    if trace.plan != saved.digest:
        raise RequestError(
            f"{path}: its steps are of the plan {trace.plan}, and {saved.file} is the plan "
            f"{saved.digest}",
            hint="Give the trace together with the plan of its script.",
        )
    costs, seen = saved.plan.costs, trace.median
    degrees = saved.plan.degrees
    axes = degrees.split_axes or (degrees.split_axis,)
    split = "split_comm_s" if len(axes) > 1 else f"{axes[0]}_comm_s"
    split_s = sum(getattr(costs, f"{axis}_comm_s") for axis in axes)
    once_s = min(costs.optimizer_s, _once_s(saved))
    pairs = (
        (STEP_PART, costs.step_time_s, seen.step_time_s),
        ("compute_s", costs.compute_s + costs.recompute_s, seen.compute_s),
        (split, split_s, seen.split_comm_s),
        ("dp_comm_s", costs.dp_comm_s, seen.dp_comm_s),
        ("pp_comm_s", costs.pp_comm_s, seen.pp_comm_s),
        ("bubble_s", costs.bubble_s, seen.bubble_s),
        ("update_s", costs.optimizer_s - once_s, seen.update_s),
        ("host_s", once_s, seen.host_s),
    )
    notes = (
        f"median of {len(trace.steps)} steps of rank {trace.rank}"
        f"{', which computes longest' * path.is_dir()}; torch's profiler slows hosts "
        "down",
        "compute is with recomputation; where kernels wait for the host, the plan counts that in "
        "compute",
    )
    return Comparison(
        plan=saved,
        other=None,
        parts=tuple(Part(name=name, first=a, second=b) for name, a, b in pairs),
        notes=notes,
    )


def _once_s(saved: SavedPlan) -> float:
    """What the script does once a step, whatever the model."""
    request = saved.request
    framework, _ = framework_on_cluster(
        SCRIPT,
        request.cluster,
        gpus=saved.cluster.num_gpus,
        gpus_per_node=request.gpus_per_node,
        calibration=request.calibration,
    )
    return framework.step_s


def _fullest(plan: Plan) -> MemoryBreakdown:
    return max(plan.memory_by_rank, key=lambda memory: memory.total_bytes)


def _fields(kind: type, first: object, second: object) -> list[tuple[str, float, float]]:
    return [
        (field.name, getattr(first, field.name), getattr(second, field.name))
        for field in fields(kind)
    ]
