"""A plan beside its script, as a person reads it in a terminal."""

from rich.console import Console, RenderableType
from rich.text import Text

from planner.checking.check import COMPONENTS, PlanCheck, TrafficCheck
from planner.cli.pieces import figures, stack
from planner.cli.terminal import write_answer
from planner.units import format_bytes, memory_unit

MOST_STAGES = 16
"""Pipeline ranks that are listed without -v."""


def print_check(console: Console, check: PlanCheck, *, verbose: bool) -> None:
    """Print a check.

    Args:
        console: Where to.
        check: What to show.
        verbose: Show every pipeline rank and every collective, not those alone that are off.
    """
    sections = [_verdict(check), _memory(check, verbose=verbose), _traffic(check, verbose=verbose)]
    write_answer(console, sections)


def _verdict(check: PlanCheck) -> RenderableType:
    lines = ["The script runs: a step as one rank of each pipeline rank, on tensors without data."]
    if check.num_microbatches[1:]:
        few, more = check.num_microbatches
        lines.append(
            f"It was run with {few} and with {more} microbatches; each further one adds the same."
        )
    if check.trained is not None:
        lines.append(
            f"Trained here: losses are those of one process to {check.trained.difference:.1e}."
        )
    share = f"{abs(check.worst.error):.1%}"
    lines.append(f"Memory: within {share} of the plan" + ("." if check.memory_holds else ": OFF."))
    differing = sum(not each.is_equal for each in check.collectives)
    lines.append(
        "Collectives: kinds, groups and counts as planned, bytes within 1%."
        if not differing
        else f"Collectives: {differing} of {len(check.collectives)} kinds differ from the plan."
    )
    return stack(*map(Text, lines))


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
