"""The answer as a person reads it in a terminal of 80 columns or more.

No box drawing: the same text reads well in a terminal, a pipe and a log.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from planner.cli.pieces import WIDE_COLUMNS, draw_bar, grid, stack, titled
from planner.cli.terminal import write_answer
from planner.hardware.nodes import nodes_from_to, numbering_words, smaller_nodes
from planner.hardware.spec import ClusterSpec
from planner.plan.record import PlanRecord
from planner.plan.types import Plan
from planner.report.view import (
    cluster_words,
    error_words,
    header_facts,
    headline,
    memory_table,
    other_layouts,
    refused_details,
    refused_words,
    safer_words,
    split_words,
    step_parts,
)
from planner.report.words import (
    NOT_MODELLED,
    explanation,
    layout_words,
    policy_words,
    searched_words,
    solver_words,
    unit_words,
)
from planner.units import format_s

BAR_CELLS = 20
"""Length of a full bar where there is room."""

NARROW_BAR_CELLS = 12
"""Length of a full memory bar on 80 columns."""

CROWDED_SHARE = 0.95
"""Share of the memory from which the bar is red."""

MEMORY_LEGEND = (
    "optim: AdamW's two moments; activ: kept for backward; buffers: gathered parameters and "
    "messages; temp: highest transient; reserve: context, communicators, allocator"
)
"""What the columns of the memory table mean."""

MOST_REASONS = 12
"""Reasons of refusals that -v lists for each rule."""

MOST_STAGES = 16
"""Stages that are listed without -v."""

RENDEZVOUS_PORT = 29500
"""Port of torchrun's rendezvous, its own default."""


def print_result(
    console: Console, record: PlanRecord, *, files: Sequence[Path], verbose: bool
) -> None:
    """Print one run.

    Args:
        console: Where to.
        record: What to show.
        files: Files that were written, in the order of the folder's listing.
        verbose: Show the pattern of blocks, every rank and every reason of a refusal.
    """
    best = record.outcome.best
    sections: list[RenderableType] = [
        _header(record, verbose=verbose),
        _recommended(record),
        _memory(console, record, verbose=verbose),
    ]
    if record.module_rows:
        sections.append(_split(record))
    if len(best.stages) > 1:
        sections.append(_stages(best, verbose=verbose))
    sections.append(_step(console, best))
    if other_layouts(record):
        sections.append(_others(record))
    sections.append(_evidence(record, verbose=verbose))
    if files:
        sections.append(_written(files))
    write_answer(console, sections)
    if files:
        console.file.write(_launch(record, files))


def _launch(record: PlanRecord, files: Sequence[Path]) -> str:
    """Give the launch command on one line, however long: it is there to be copied."""
    folder = files[0].parent
    command = _launch_command(record.cluster, folder / "train.py")
    lines = [f"Run    {command}"]
    if record.cluster.num_nodes > 1:
        lines += [f"       {each}" for each in _node_words(record.cluster)]
    if folder / "launch" in files:
        kinds = "on each node" if record.cluster.parts else "with Slurm, Kubernetes, SkyPilot"
        lines.append(f"       {folder / 'launch'}/: to start it {kinds}")
    return "\n".join(lines) + "\n"


def _launch_command(cluster: ClusterSpec, script: Path) -> str:
    """Write the torchrun command for a script, one process per device."""
    target = shlex.quote(str(script))
    if cluster.num_nodes == 1:
        return f"torchrun --standalone --nproc-per-node {cluster.num_gpus} {target}"
    start = f"torchrun --nnodes {cluster.num_nodes} --nproc-per-node {cluster.gpus_per_node}"
    if cluster.is_flat:
        return f"{start} --rdzv-backend c10d --rdzv-endpoint HOST:{RENDEZVOUS_PORT} {target}"
    place = f"--node-rank RANK --master-addr HOST --master-port {RENDEZVOUS_PORT}"
    return f"{start} {place} {target}"


def _node_words(cluster: ClusterSpec) -> list[str]:
    """Say on which nodes the command runs, and how they are numbered where that counts."""
    words = ["on every node; HOST is the first of them"]
    if not cluster.is_flat:
        words.append(f"RANK counts nodes from 0 on: {', '.join(numbering_words(cluster))}")
    for first, last, ranks in smaller_nodes(cluster):
        words.append(f"{nodes_from_to(first, last)}: --nproc-per-node {ranks}")
    return words


def _header(record: PlanRecord, *, verbose: bool) -> RenderableType:
    table = grid()
    table.add_row(Text("Model", "bold"), Text(record.model.name))
    table.add_row("", Text(", ".join(header_facts(record))))
    if verbose and record.model.block_pattern:
        table.add_row("", Text(f"blocks {record.model.block_pattern}"))
    table.add_row(Text("Cluster", "bold"), Text(cluster_words(record.cluster)))
    return table


def _recommended(record: PlanRecord) -> RenderableType:
    best = record.outcome.best
    table = grid()
    table.add_row(Text("Plan", "bold"), Text(layout_words(best), "bold green"))
    table.add_row("", Text("   ".join(headline(record)), "bold"))
    for term, meaning in explanation(best, record.cluster):
        table.add_row(Text(f"  {term}", "dim"), Text(meaning, "dim"))
    return table


def _memory(console: Console, record: PlanRecord, *, verbose: bool) -> RenderableType:
    memory = memory_table(record.outcome.best, record.cluster, show_all=verbose)
    where = " by pipeline rank" if len(memory.lines) > 1 else ""
    title = f"Memory per device{where}, {memory.unit} of {memory.capacity}"
    wide = console.width >= WIDE_COLUMNS
    table = titled(title, gap=2 if wide else 1)
    for head in memory.head:
        table.add_column(Text(head, "dim"), justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for line in memory.lines:
        style = "red" if line.share > CROWDED_SHARE else "green"
        bar = Text(draw_bar(line.share, BAR_CELLS if wide else NARROW_BAR_CELLS), style)
        bar.append(f"{line.share:>5.0%}", "default")
        table.add_row(*(Text(cell) for cell in line.cells), bar)
    notes = [Text(f"{memory.hidden} (-v shows all)", "dim")] if memory.hidden else []
    return stack(table, *notes, Text(MEMORY_LEGEND, "dim"))


def _split(record: PlanRecord) -> RenderableType:
    degrees = record.outcome.best.degrees
    experts = f", experts over {degrees.ep}" if 1 < degrees.ep != degrees.split_ranks else ""
    ranks = f"{degrees.split_ranks} ranks of {degrees.split_axis}"
    table = titled(f"Split over {ranks}{experts}", heads=False)
    table.add_column("", max_width=24)
    table.add_column("")
    for units, words in split_words(record):
        table.add_row(Text(units), Text(words))
    return table


def _stages(plan: Plan, *, verbose: bool) -> RenderableType:
    table = titled("Stages, times for one microbatch")
    for head in ("stage", "rank"):
        table.add_column(Text(head, "dim"), justify="right", no_wrap=True)
    table.add_column(Text("units", "dim"))
    table.add_column(Text("recompute", "dim"), no_wrap=True)
    for head in ("forward", "backward"):
        table.add_column(Text(head, "dim"), justify="right", no_wrap=True)
    shown = plan.stages if verbose else plan.stages[:MOST_STAGES]
    for stage in shown:
        units = plan.units[stage.first_unit : stage.end_unit]
        table.add_row(
            str(stage.index),
            str(stage.pp_rank),
            Text(unit_words(units)),
            policy_words(stage.activation_checkpointing, units),
            format_s(stage.forward_s),
            format_s(stage.backward_s),
        )
    hidden = len(plan.stages) - len(shown)
    if not hidden:
        return table
    return stack(table, Text(f"and {hidden} more stages (-v shows all)", "dim"))


def _step(console: Console, plan: Plan) -> RenderableType:
    step_time_s = plan.costs.step_time_s
    table = titled(f"Where the {format_s(step_time_s)} of a step go", heads=False)
    table.add_column("")
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for part in step_parts(plan.costs):
        bar = Text(draw_bar(part.share, BAR_CELLS), "cyan")
        bar.append(f"{part.percent:>5}", "default")
        table.add_row(part.word, part.time, bar)
    return table


def _others(record: PlanRecord) -> RenderableType:
    table = titled("Other layouts, and what they lose", heads=False)
    table.add_column("", no_wrap=True)
    table.add_column("", ratio=2)
    for _ in ("memory", "step", "percent"):
        table.add_column("", justify="right", no_wrap=True)
    table.add_column("", ratio=2)
    for other in other_layouts(record):
        layout = Text(other.layout)
        if other.details:
            layout.append(f"\n{other.details}", "dim")
        table.add_row(other.label, layout, other.memory, other.step, other.percent, Text(other.why))
    notes = [Text(safer)] if (safer := safer_words(record)) else []
    if record.outcome.rule_of_thumb is not None:
        meaning = "Rule of thumb: tp as small as fits in a node, then pp, the rest data-parallel"
        notes.append(Text(meaning, "dim"))
    return stack(table, *notes)


def _evidence(record: PlanRecord, *, verbose: bool) -> RenderableType:
    """What was refused, what is proven, what is left out."""
    outcome = record.outcome
    lines: list[RenderableType] = []
    refused = refused_words(outcome)
    if refused:
        hint = "  (-v: reasons)" if refused_details(outcome) and not verbose else ""
        lines.append(Text(refused + hint))
    if verbose and refused_details(outcome):
        lines.append(_refusals(record))
    lines.append(Text(f"Solver: {solver_words(outcome.solver)}"))
    if searched := searched_words(outcome.solver):
        lines.append(Text(searched, "dim"))
    lines.append(Text(error_words(record.outcome.best, record.cluster), "dim"))
    lines.append(Text(f"Not modelled: {NOT_MODELLED}", "dim"))
    return stack(*lines)


def _refusals(record: PlanRecord) -> RenderableType:
    table = grid()
    for rule, reasons in refused_details(record.outcome).items():
        for reason, count in reasons[:MOST_REASONS]:
            table.add_row(Text(f"{count} x", "dim"), Text(reason, "dim"))
        hidden = len(reasons) - MOST_REASONS
        if hidden > 0:
            table.add_row("", Text(f"and {hidden} more by {rule}, in report.csv", "dim"))
    return table


def _written(files: Sequence[Path]) -> RenderableType:
    folder = files[0].parent
    table = grid()
    names = "  ".join(file.name for file in files)
    table.add_row(Text("Wrote", "bold"), Text(f"{folder}/: {names}"))
    return table
