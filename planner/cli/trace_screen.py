"""A trace as a person reads it in a terminal of 80 columns or more."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from planner.cli.pieces import WIDE_COLUMNS, closing, figures, grid, stack
from planner.cli.terminal import write_answer
from planner.graph.analysis.patterns import block_pattern
from planner.graph.analysis.summary import batch_words, parameter_words
from planner.graph.operator_graph import OperatorGraph
from planner.report.trace_view import (
    KIND_HEAD,
    MASKED_HEAD,
    MASKED_NOTE,
    MOST_CUTS,
    UNIT_HEAD,
    cut_notes,
    cut_rows,
    cut_words,
    kept_table,
    kind_rows,
    op_words,
    refused_rows,
    unit_rows,
    work_table,
)

LEFT_COLUMNS = frozenset({"kind", "first", "unit", "recompute"})
"""Columns of words; the others are numbers."""

FOLDED = frozenset({"first", "unit"})
"""Columns that fold where there is no room: module paths can be long."""


def print_trace(
    console: Console,
    graph: OperatorGraph,
    *,
    files: Sequence[Path],
    phases_s: Mapping[str, float],
    verbose: bool,
) -> None:
    """Print one trace.

    Args:
        console: Where to.
        graph: What to show.
        files: Files that were written.
        phases_s: Wall time by phase.
        verbose: Show every unit and every cut.
    """
    sections = [_header(graph), _work(graph), _kept(graph), _blocks(console, graph)]
    if verbose:
        sections.append(_units(console, graph))
    sections.append(_cuts(console, graph, verbose=verbose))
    sections.append(closing(files, phases_s))
    write_answer(console, sections)


def _header(graph: OperatorGraph) -> RenderableType:
    table = grid()
    table.add_row(Text("Model", "bold"), Text(graph.model))
    table.add_row("", Text(f"{parameter_words(graph)} parameters; {batch_words(graph)}"))
    table.add_row(Text("Operators", "bold"), Text(op_words(graph)))
    return table


def _work(graph: OperatorGraph) -> RenderableType:
    head, *rows = work_table(graph)
    table = _table("Work of one microbatch", head, rows, gap=2)
    return stack(table, Text(MASKED_NOTE, "dim")) if MASKED_HEAD in head else table


def _kept(graph: OperatorGraph) -> RenderableType:
    head, *rows = kept_table(graph)
    return _table("Kept for backward, by recomputation of blocks", head, rows, gap=2)


def _blocks(console: Console, graph: OperatorGraph) -> RenderableType:
    pattern = str(block_pattern(graph))
    title = f"Blocks: {pattern or 'none, the model is one piece'}"
    table = _table(title, KIND_HEAD, kind_rows(graph), gap=_gap(console))
    if not pattern:
        return table
    return stack(table, Text("sizes of one block; blocks of a kind compute the same", "dim"))


def _units(console: Console, graph: OperatorGraph) -> RenderableType:
    return _table("Units, in order", UNIT_HEAD, unit_rows(graph), gap=_gap(console))


def _cuts(console: Console, graph: OperatorGraph, *, verbose: bool) -> RenderableType:
    rows = cut_rows(graph, verbose=verbose)
    shown = rows if verbose else rows[:MOST_CUTS]
    parts: list[RenderableType] = [Text(f"Cuts: {cut_words(graph)}", "bold")]
    if shown:
        table = Table.grid(padding=(0, _gap(console), 0, 0))
        for justify in ("left", "right", "right", "left"):
            table.add_column(justify=justify, no_wrap=justify == "right", overflow="fold")
        for row in shown:
            table.add_row(*(Text(cell) for cell in row))
        parts.append(table)
    if hidden := len(rows) - len(shown):
        parts.append(Text(f"and {hidden} more {'row' if hidden == 1 else 'rows'} (-v)", "dim"))
    parts.extend(Text(words, "dim") for words in cut_notes(graph))
    if verbose:
        parts.extend(
            Text(f"no cut {place}: {reason}", "dim") for place, reason in refused_rows(graph)
        )
    return stack(*parts)


def _table(
    title: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, gap: int
) -> RenderableType:
    return figures(title, head, rows, words=LEFT_COLUMNS, folded=FOLDED, gap=gap)


def _gap(console: Console) -> int:
    return 2 if console.width >= WIDE_COLUMNS else 1
