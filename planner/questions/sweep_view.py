"""What the screen and a notebook show of a sweep, as strings: no layout, no colour."""

from dataclasses import dataclass
from pathlib import Path

from planner.questions.sweep import (
    SECONDS_PER_DAY,
    SECONDS_PER_HOUR,
    Sweep,
    SweepPoint,
)
from planner.report.figures import plan_figures
from planner.report.words import layout_words
from planner.units import format_bytes, format_count, format_s

_BILLION = 1e9

_HEADS = {
    "cluster": "cluster",
    "seq_len": "length",
    "global_batch_size": "batch",
    "gpus": "GPUs",
}
"""Columns of what points differ in."""

_OBJECTIVE_WORDS = {
    "step": "the fastest",
    "gpus": "the fewest GPUs that hold it",
    "cost": "the cheapest",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepView:
    """A sweep in words."""

    title: str
    """Model, and what all points share."""
    head: tuple[str, ...]
    """Names of the columns."""
    rows: tuple[tuple[str, ...], ...]
    """Cells of every point that has a plan."""
    refusals: tuple[str, ...]
    """Why the others have none."""
    pick: str
    """The point that is recommended, "" for none."""
    command: str
    """Command line that writes its plan and script, "" for none."""
    notes: tuple[str, ...]
    """What the numbers are of."""


def sweep_view(sweep: Sweep) -> SweepView:
    """Put a sweep into words."""
    varied = _varied(sweep)
    columns = [_columns(sweep, point) for point in sweep.planned]
    return SweepView(
        title=_title(sweep),
        head=(*(_HEADS[name] for name in varied), *(columns[0] if columns else ())),
        rows=tuple(
            (*(_value(point, name) for name in varied), *cells.values())
            for point, cells in zip(sweep.planned, columns, strict=True)
        ),
        refusals=tuple(
            f"{_point_words(point, varied)}: {point.refusal}"
            for point in sweep.points
            if point.refusal is not None
        ),
        pick=_pick_words(sweep, varied),
        command=_command(sweep),
        notes=_notes(sweep),
    )


def token_word(sweep: Sweep) -> str:
    """What the points count: "tokens", or "samples" where the model has none."""
    words = {point.record.model.token_word for point in sweep.points if point.record}
    return next(iter(words), "tokens")


def cost_word(sweep: Sweep) -> str:
    """What a token costs: money where prices are given, else hours of one GPU."""
    what = "cost" if sweep.request.prices_per_gpu_hour else "GPU hours"
    return f"{what} per 10^9 {token_word(sweep)}"


def series_words(sweep: Sweep, point: SweepPoint) -> str:
    """Name what a point shares with those of other numbers of GPUs, "" where all do."""
    return _point_words(point, tuple(name for name in _varied(sweep) if name != "gpus"))


def _varied(sweep: Sweep) -> tuple[str, ...]:
    """What the points differ in; the number of devices always."""
    requests = sweep.request.points
    return tuple(
        name
        for name in _HEADS
        if name == "gpus" or len({getattr(request, name) for request in requests}) > 1
    )


def _title(sweep: Sweep) -> str:
    first = sweep.request.points[0]
    model = next((point.record.model for point in sweep.planned if point.record), None)
    facts = [f"{format_count(model.num_parameters)} parameters"] if model else []
    varied = _varied(sweep)
    if model and model.seq_len and "seq_len" not in varied:
        facts.append(f"sequence {model.seq_len}")
    if "global_batch_size" not in varied:
        facts.append(f"global batch {first.global_batch_size} at every point")
    if "cluster" not in varied:
        facts.append(f"cluster {first.cluster}")
    facts += [f"{name}={value}" for name, value in first.fixed]
    return f"{model.name if model else first.model}: {', '.join(facts)}"


def _columns(sweep: Sweep, point: SweepPoint) -> dict[str, str]:
    """Cells of a point that has a plan, by the names of their columns."""
    record, scaling = point.record, sweep.scaling(point)
    assert record is not None
    assert scaling is not None
    plan, figures = record.outcome.best, plan_figures(record.outcome.best, record.cluster)
    cells = {
        "layout": layout_words(plan),
        "step": format_s(figures.step_time_s),
        f"{token_word(sweep)}/s": format_count(point.tokens_per_s),
        "scaling": f"{scaling:.0%}",
        "MFU": "-" if figures.mfu is None else f"{figures.mfu:.1%}",
        "memory": format_bytes(figures.peak_memory_bytes),
    }
    if point.duration_s is None:
        return {**cells, cost_word(sweep): _per_billion(sweep, point)}
    cells["days"] = f"{point.duration_s / SECONDS_PER_DAY:.3g}"
    if sweep.request.prices_per_gpu_hour:
        return {**cells, "cost": "-" if point.cost is None else format_count(point.cost)}
    return {**cells, "GPU hours": format_count(_gpu_hours(point))}


def _gpu_hours(point: SweepPoint) -> float:
    """Hours of one device for all tokens that are to be trained on."""
    assert point.duration_s is not None
    return point.duration_s * point.request.gpus / SECONDS_PER_HOUR


def _per_billion(sweep: Sweep, point: SweepPoint) -> str:
    gpu_s, cost = point.gpu_s_per_token, point.cost_per_token
    assert gpu_s is not None
    if not sweep.request.prices_per_gpu_hour:
        return format_count(_BILLION * gpu_s / SECONDS_PER_HOUR)
    return "-" if cost is None else format_count(_BILLION * cost)


def _value(point: SweepPoint, name: str) -> str:
    value = getattr(point.request, name)
    if name == "seq_len" and value is None:
        return "its own" if point.record is None else str(point.record.model.seq_len)
    return Path(value).stem if name == "cluster" else str(value)


def _point_words(point: SweepPoint, varied: tuple[str, ...]) -> str:
    return ", ".join(f"{_HEADS[name]} {_value(point, name)}" for name in varied)


def _pick_words(sweep: Sweep, varied: tuple[str, ...]) -> str:
    pick, request = sweep.pick, sweep.request
    if pick is None:
        return ""
    words = _OBJECTIVE_WORDS[request.objective]
    if request.within:
        chosen = "fewest GPUs" if request.objective == "step" else "fastest"
        words = f"the {chosen} within {100 * request.within:.3g}% of {words}"
    return f"{_point_words(pick, varied)}: {words}"


def _command(sweep: Sweep) -> str:
    pick = sweep.pick
    if pick is None:
        return ""
    request = pick.request
    parts = [f"plan {request.model} --gpus {request.gpus} --cluster {request.cluster}"]
    for option in (
        *("gpus_per_node", "calibration", "global_batch_size", "seq_len", "dtype"),
        "memory_margin",
    ):
        value = getattr(request, option)
        if value is not None:
            parts.append(f"--{option.replace('_', '-')} {value}")
    parts += [f"--fix {name}={value}" for name, value in request.fixed]
    parts += [f"--hint {line}={str(value).lower()}" for line, value in request.hints]
    return " ".join(parts)


def _notes(sweep: Sweep) -> tuple[str, ...]:
    word = token_word(sweep)
    notes = [
        f"scaling: {word}/s/GPU over those of the fewest GPUs; predicted, without restarts and "
        "idle time"
    ]
    open_ = [point for point in sweep.planned if not _is_proven(point)]
    proven = len(sweep.planned) - len(open_)
    if sweep.planned:
        notes.append(f"{proven} of {len(sweep.planned)} plans are proven best of their searches")
    if sweep.interrupted:
        count = len(sweep.request.points)
        notes.append(f"interrupted: {len(sweep.points)} of {count} points were reached")
    return tuple(notes)


def _is_proven(point: SweepPoint) -> bool:
    assert point.record is not None
    return point.record.outcome.solver.status == "optimal"
