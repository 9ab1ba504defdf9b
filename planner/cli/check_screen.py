"""A plan beside its script, as a person reads it in a terminal."""

from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.text import Text

from planner.checking.check import (
    COMPONENTS,
    LEAST_MEMORY_BYTES,
    MOST_MEMORY_ERROR,
    PlanCheck,
    TrafficCheck,
)
from planner.checking.share import ShareCheck
from planner.cli.pieces import figures, stack
from planner.cli.terminal import write_answer
from planner.units import format_bytes, format_s, memory_unit

MOST_STAGES = 16
"""Pipeline ranks that are listed without -v."""


def print_check(console: Console, check: PlanCheck, *, verbose: bool) -> None:
    """Print a check.

    Args:
        console: Where to.
        check: What to show.
        verbose: Show every pipeline rank and every collective, not those alone that are off.
    """
    sections = [
        _verdict(check),
        _memory(check, verbose=verbose),
        _traffic(check, verbose=verbose),
    ]
    if check.shares:
        sections.append(_shares(check.shares))
    write_answer(console, sections)


def _verdict(check: PlanCheck) -> RenderableType:
    return stack(*(Text(line) for line in (*_fake_lines(check), *_real_lines(check))))


def _fake_lines(check: PlanCheck) -> list[str]:
    """What ranks on tensors without data showed."""
    lines = ["The script runs: a step as one rank of each pipeline rank, on tensors without data."]
    if check.num_microbatches[1:]:
        few, more = check.num_microbatches
        lines.append(
            f"It was run with {few} and with {more} microbatches; each further one adds the same."
        )
    error = check.worst.error
    if check.as_written:
        lines.append("Blocks ran as written; compiled, they hold no more.")
    if check.as_written and error < -MOST_MEMORY_ERROR:
        lines.append(f"Memory: the plan says {-error:.1%} less, which only --gpu measures.")
    else:
        off = [] if check.worst.is_off_by_little else [f"{abs(error):.1%}"]
        if any(stage.is_off_by_little for stage in check.stages):
            off.append(f"{LEAST_MEMORY_BYTES // 2**20} MiB")
        is_held = check.worst.is_off_by_little or abs(error) <= MOST_MEMORY_ERROR
        end = "." if is_held else ": OFF."
        lines.append(f"Memory: within {' or '.join(off)} of the plan{end}")
    differing = sum(not each.is_equal for each in check.collectives)
    lines.append(
        "Collectives: kinds, groups and counts as planned, bytes within 1%."
        if not differing
        else f"Collectives: {differing} of {len(check.collectives)} kinds differ from the plan."
    )
    return lines


def _real_lines(check: PlanCheck) -> list[str]:
    """What was run on this machine."""
    lines = []
    if check.trained is not None:
        difference = f"are those of one process to {check.trained.difference:.1e}"
        if check.trained.first_not_finite is not None:
            difference = "of one process are no numbers, and were not compared"
        lines.append(f"Trained here: losses {difference}.")
    if check.shares:
        off = max((share.time_error for share in check.shares), key=abs)
        lines.append(
            f"Share of one rank on {check.shares[0].device}: time without links within "
            f"{abs(off):.1%} of the plan."
        )
    return lines


def _shares(shares: Sequence[ShareCheck]) -> RenderableType:
    """Time and memory of each pipeline rank; memory where the device tells it."""
    peak = max(share.predicted_device_bytes for share in shares)
    unit, scale = memory_unit(peak)
    rows = []
    for share in shares:
        sizes = (
            (share.predicted_peak_bytes, share.measured_peak_bytes),
            (share.predicted_device_bytes, share.measured_device_bytes),
        )
        cells = ["-" if each is None else f"{each / scale:.2f}" for pair in sizes for each in pair]
        times = [format_s(share.predicted_busy_s), format_s(share.measured_busy_s)]
        off = "" if share.measured_peak_bytes is None else f"{share.memory_error:+.1%}"
        errors = (f"{share.time_error:+.1%}", off)
        rows.append([str(share.pp_rank), *times, errors[0], *cells[:2], errors[1], *cells[2:]])
    return figures(
        f"A rank by itself on {shares[0].device}: busy seconds of a step, no links; {unit}",
        [
            *("rank", "planned", "measured", "off"),
            *("planned peak", "allocated", "off", "with reserve", "in use"),
        ],
        rows,
        words=(),
        folded=(),
    )


def _memory(check: PlanCheck, *, verbose: bool) -> RenderableType:
    shown = check.stages if verbose else check.stages[:MOST_STAGES]
    unit, scale = memory_unit(max(stage.predicted_peak_bytes for stage in check.stages))
    rows = []
    for stage in shown:
        for name, sizes, peak in (
            ("planned", stage.predicted_bytes, stage.predicted_peak_bytes),
            ("script", stage.tracked_bytes, stage.tracked_peak_bytes),
        ):
            is_first = name == "planned"
            cells = [f"{sizes[each] / scale:.2f}" for each in COMPONENTS]
            off = f"{stage.error:+.1%}" if is_first else ""
            rank = str(stage.pp_rank) if is_first else ""
            rows.append([rank, name, *cells, f"{peak / scale:.2f}", off])
    table = figures(
        f"Peak memory by pipeline rank, {unit}, without the reserve",
        ["rank", "", "params", "optimizer", "grads, buffers", "activations", "peak", "off"],
        rows,
        words=(),
        folded=(),
    )
    hidden = len(check.stages) - len(shown)
    return stack(table, Text(f"and {hidden} more (-v shows all)", "dim")) if hidden else table


def _traffic(check: PlanCheck, *, verbose: bool) -> RenderableType:
    first = check.stages[0].pp_rank
    shown = [
        each for each in check.collectives if verbose or not each.is_equal or each.pp_rank == first
    ]
    some = "" if verbose else f" of pipeline rank {first}, and all that differ"
    return figures(
        f"Collectives in a step{some}",
        ["rank", "kind", "ranks", "planned", "script", "planned bytes", "script bytes", ""],
        [_traffic_row(each) for each in shown],
        words=("kind",),
        folded=(),
    )


def _traffic_row(each: TrafficCheck) -> list[str]:
    return [
        str(each.pp_rank),
        each.kind,
        str(each.group_size),
        str(each.predicted_count),
        str(each.counted_count),
        format_bytes(each.predicted_bytes),
        format_bytes(each.counted_bytes),
        "" if each.is_equal else "DIFFERS",
    ]
