"""Reads where the time of a step went from a trace of torch's profiler, one rank's.

Every moment of a step is counted once, under the first of these that it belongs to: the update (all
that follows the backward passes), compute, collectives by axis, and what is left, when the device
waited for its host. Kernels compute on a GPU, ATen's ops on a CPU.

NCCL's kernels name the group that they run over. gloo's spans lie on threads of its own and name
the kind alone: the n-th span of a kind is that of the n-th op that starts such a collective, and
FSDP2's hooks mark those over data-parallel ranks.
"""

import gzip
import json
import statistics
from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from planner.errors import RequestError
from planner.runtime.log import STEP, UPDATE
from planner.strategy.rules import SPLIT_AXES
from planner.vocabulary import Axis

Interval = tuple[float, float]
"""Begin and end, microseconds."""

Event = Mapping[str, object]

_GLOO_KINDS = {
    "gloo:all_gather": ("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_"),
    "gloo:all_reduce": (
        *("allreduce_", "allreduce_coalesced_", "_reduce_scatter_base_"),
        *("reduce_scatter_", "reduce_scatter_tensor_coalesced_"),
    ),
    "gloo:all_to_all": ("alltoall_base_",),
}
"""Collectives of gloo, and the ops that start them; its reduce-scatter is an all-reduce."""

_SPLIT = "split"
"""tp, cp or ep, whichever the plan has."""

_TRANSFERS = ("gloo:send", "gloo:recv")
_TORCH_TRACE = "Have the script write one: train.py --steps 10 --torch-trace DIR."


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Where the time of a step went on one rank, seconds; the parts add up to the step."""

    compute_s: float
    """Forward and backward, recomputation among them."""
    split_comm_s: float
    """Tensor- or context-parallel collectives with no compute beside them."""
    pp_comm_s: float
    """Transfers between stages, as long as the shortest of the step."""
    dp_comm_s: float
    """Data-parallel collectives with no compute beside them."""
    bubble_s: float
    """Waiting for other stages, beyond the time of transfers."""
    update_s: float
    """Norm, clipping and the optimiser."""
    host_s: float
    """Nothing ran, or all ranks were waited for."""

    @property
    def step_time_s(self) -> float:
        """The step."""
        return sum(float(getattr(self, field.name)) for field in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchTrace:
    """What a trace says."""

    plan: str
    """Names the plan."""
    rank: int
    """Rank that it is of."""
    steps: tuple[StepParts, ...]
    """Steps, in order."""

    @property
    def median(self) -> StepParts:
        """Median of each part."""
        return StepParts(
            **{
                field.name: statistics.median(getattr(step, field.name) for step in self.steps)
                for field in fields(StepParts)
            }
        )


def is_torch_trace(path: Path) -> bool:
    """Whether a file is named as traces are, and not as logs; a folder holds traces."""
    return path.is_dir() or path.suffix in (".json", ".gz")


def read_torch_trace(path: Path) -> TorchTrace:
    """Read a trace; of a folder with those of several ranks the rank that computes longest.

    Raises:
        RequestError: It cannot be read, is not of an emitted script, or the folder has none.
    """
    if not path.is_dir():
        return _read_file(path)
    files = sorted(path.glob("rank-*.json*"))
    if not files:
        raise RequestError(f"{path}: this folder holds no trace rank-*.json", hint=_TORCH_TRACE)
    return max(map(_read_file, files), key=lambda trace: trace.median.compute_s)


def _read_file(file: Path) -> TorchTrace:
    document = _document(file)
    events = [
        event
        for event in document["traceEvents"]
        if isinstance(event, dict) and event.get("ph") == "X" and "dur" in event
    ]
    spans = _Spans(events)
    if "plan" not in document or not spans.steps:
        raise RequestError(
            f"{file}: this trace does not say which plan's steps it has", hint=_TORCH_TRACE
        )
    distributed = document.get("distributedInfo", {})
    return TorchTrace(
        plan=str(document["plan"]),
        rank=int(distributed.get("rank", 0)),
        steps=tuple(spans.parts(step) for step in spans.steps),
    )


def _document(file: Path) -> dict[str, Any]:
    try:
        raw = file.read_bytes()
        document = json.loads(gzip.decompress(raw) if file.suffix == ".gz" else raw)
    except (OSError, ValueError, EOFError) as error:
        raise RequestError(
            f"{file}: the trace cannot be read: {error}", hint=_TORCH_TRACE
        ) from error
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise RequestError(f"{file}: this is no trace of torch's profiler", hint=_TORCH_TRACE)
    return document


class _Spans:
    """The spans of a trace by what they are."""

    def __init__(self, events: Sequence[Event]) -> None:
        kernels = [event for event in events if event.get("cat") == "kernel"]
        on_gpu = bool(kernels)
        own = "gpu_user_annotation" if on_gpu else "user_annotation"
        self.steps = _named(events, STEP, "user_annotation")
        updates = _named(events, UPDATE, own)
        self._update = _joined(updates)
        if on_gpu:
            computing = [
                event
                for event in events
                if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
                and not _is_nccl(event)
            ]
            comm = [(_nccl_axis(event), _interval(event)) for event in kernels if _is_nccl(event)]
            transfers = [event for event in kernels if _nccl_axis(event) == Axis.PP]
        else:
            computing = [
                event
                for event in events
                if event.get("cat") == "cpu_op"
                and str(event["name"]).startswith(("aten::", "fsdp::"))
            ]
            transfers = [event for event in events if event["name"] in _TRANSFERS]
            comm = [(Axis.PP, _interval(event)) for event in transfers]
            comm += _gloo_axes(events, self.steps, updates)
        self._compute = _joined(map(_interval, computing))
        self._comm = {
            axis: _joined(interval for each, interval in comm if each == axis)
            for axis in (_SPLIT, "dp", Axis.PP, "")
        }
        self._transfers = sorted(map(_interval, transfers))

    def parts(self, step: Interval) -> StepParts:
        """Count each moment of a step once."""
        left = [step]
        taken = {}
        for name, spans in (
            ("update", self._update),
            ("compute", self._compute),
            *self._comm.items(),
        ):
            rest = _without(left, spans)
            taken[name] = _length(left) - _length(rest)
            left = rest
        own = [end - begin for begin, end in self._transfers if step[0] <= begin < step[1]]
        moved_us = min(taken[Axis.PP], len(own) * min(own, default=0.0))
        waited_us = taken[Axis.PP] - moved_us
        # Where stages differ, the end of a step, when all ranks meet, is a part of the bubble.
        met_us = taken[""]
        return StepParts(
            compute_s=taken["compute"] * 1e-6,
            split_comm_s=taken[_SPLIT] * 1e-6,
            pp_comm_s=moved_us * 1e-6,
            dp_comm_s=taken["dp"] * 1e-6,
            bubble_s=(waited_us + (met_us if own else 0.0)) * 1e-6,
            update_s=taken["update"] * 1e-6,
            host_s=(_length(left) + (0.0 if own else met_us)) * 1e-6,
        )


def _named(events: Sequence[Event], name: str, category: str) -> list[Interval]:
    return sorted(
        _interval(event)
        for event in events
        if event.get("name") == name and event.get("cat") == category
    )


def _is_nccl(event: Event) -> bool:
    return "nccl" in str(event["name"]).lower()


def _nccl_axis(event: Event) -> str:
    """The axis of a kernel, by the mesh dim that its group is of; "" for all ranks."""
    arguments = event.get("args")
    group = ""
    if isinstance(arguments, dict):
        group = str(arguments.get("Process Group Description", ""))
    if group in [f"mesh_{axis}" for axis in SPLIT_AXES]:  # what ranks exchange are sends, too
        return _SPLIT
    if "SendRecv" in str(event["name"]):
        return Axis.PP
    if "dp_" in group:
        return "dp"
    return Axis.PP if group == f"mesh_{Axis.PP}" else ""


def _gloo_axes(
    events: Sequence[Event], steps: Sequence[Interval], updates: Sequence[Interval]
) -> Iterator[tuple[str, Interval]]:
    """The axis of each of gloo's spans; "" where all ranks meet after an update."""
    hooks = _joined(_interval(event) for event in events if str(event["name"]).startswith("FSDP::"))
    begins = [begin for begin, _ in steps]
    ends = [end for _, end in updates]
    for kind, names in _GLOO_KINDS.items():
        spans = sorted(_interval(event) for event in events if event["name"] == kind)
        starts = sorted(
            _interval(event)[0]
            for event in events
            if str(event["name"]).removeprefix("c10d::") in names
        )
        for start_us, span in zip(starts, spans, strict=False):
            if _without([(start_us, start_us + 1)], hooks) != [(start_us, start_us + 1)]:
                yield "dp", span
            else:
                is_over = bisect(ends, start_us) == bisect(begins, start_us)
                yield "" if is_over else _SPLIT, span


def _interval(event: Event) -> Interval:
    begin, duration = event["ts"], event["dur"]
    assert isinstance(begin, int | float)
    assert isinstance(duration, int | float)
    return begin, begin + duration


def _joined(intervals: Iterable[Interval]) -> list[Interval]:
    """The union, in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _without(intervals: Sequence[Interval], taken: Sequence[Interval]) -> list[Interval]:
    """What some intervals leave of others; both are unions in order."""
    found: list[Interval] = []
    for begin, end in intervals:
        first = bisect(taken, begin, key=lambda interval: interval[1])
        for other_begin, other_end in taken[first:]:
            if other_begin >= end:
                break
            if other_begin > begin:
                found.append((begin, other_begin))
            begin = other_end
        if begin < end:
            found.append((begin, end))
    return found


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
