"""A validation as a person reads it in a terminal of 80 columns or more."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from planner.cli.pieces import WIDE_COLUMNS, closing, figures, grid, stack
from planner.cli.terminal import write_answer
from planner.validation.types import Unpriced
from planner.validation.validate import PricedTable, ValidationResult
from planner.validation.view import (
    ERROR_HEAD,
    GROUP_HEAD,
    MOST_GROUPS,
    MOST_REASONS,
    REASON_HEAD,
    REGRET_HEAD,
    RUN_HEAD,
    error_notes,
    error_rows,
    group_rows,
    oom_rows,
    ranking_notes,
    reason_rows,
    regret_rows,
    run_notes,
    run_rows,
    table_words,
)

WORD_COLUMNS = frozenset({"model", "reason", "first of them"})
"""Columns of words, which fold where there is no room; the others are numbers."""


def print_validation(
    console: Console,
    result: ValidationResult,
    *,
    files: Sequence[Path],
    phases_s: Mapping[str, float],
    verbose: bool,
) -> None:
    """Print one validation.

    Args:
        console: Where to.
        result: What to show.
        files: Files that were written.
        phases_s: Wall time by phase.
        verbose: Show every group and every reason.
    """
    sections = [_header(result), *_runs(result), _errors(result)]
    sections.append(_regret(result))
    if result.groups:
        sections.append(_groups(console, result, verbose=verbose))
    if result.metrics.oom is not None:
        sections.append(_verdicts(result))
    sections += [
        _unpriced(priced.table.name, priced.unpriced, verbose=verbose)
        for priced in result.tables
        if priced.unpriced
    ]
    sections.append(closing(files, phases_s))
    write_answer(console, sections)


def print_calibration(
    console: Console,
    lines: Sequence[str],
    left_out: Sequence[Unpriced],
    *,
    file: Path,
    phases_s: Mapping[str, float],
) -> None:
    """Print what was fitted.

    Args:
        console: Where to.
        lines: What was fitted, and the error before and after.
        left_out: Rows that could not be used.
        file: File that was written.
        phases_s: Wall time by phase.
    """
    sections = [stack(*(Text(line) for line in lines))]
    if left_out:
        sections.append(_unpriced("left out", left_out, verbose=False))
    sections.append(closing([file], phases_s))
    write_answer(console, sections)


def _header(result: ValidationResult) -> RenderableType:
    table = grid()
    names: tuple[tuple[str, PricedTable | None], ...] = (
        ("Runs", result.runs),
        ("Failed", result.failed),
    )
    for name, priced in names:
        if priced is not None:
            words = f"{priced.table.name}: {table_words(priced)}"
            table.add_row(Text(name, "bold"), Text(words))
    return table


def _runs(result: ValidationResult) -> list[RenderableType]:
    rows = run_rows(result)
    if not rows:
        return []
    table = _table("Each run, predicted and measured", RUN_HEAD, rows)
    return [stack(table, *(Text(words, "dim") for words in run_notes(result)))]


def _errors(result: ValidationResult) -> RenderableType:
    table = _table("Predicted against measured", ERROR_HEAD, error_rows(result))
    return stack(table, *(Text(words, "dim") for words in error_notes(result)))


def _regret(result: ValidationResult) -> RenderableType:
    ranking = result.metrics.ranking
    table = _table("Choosing by predicted time", REGRET_HEAD, regret_rows(ranking))
    return stack(table, *(Text(words, "dim") for words in ranking_notes(ranking)))


def _groups(console: Console, result: ValidationResult, *, verbose: bool) -> RenderableType:
    rows = group_rows(result.groups, verbose=verbose)
    title = "Groups, the largest regret first"
    table = _table(title, GROUP_HEAD, rows, gap=2 if console.width >= WIDE_COLUMNS else 1)
    hidden = len(result.groups) - len(rows)
    if not hidden:
        return table
    return stack(table, Text(f"the worst {MOST_GROUPS}, and {hidden} more (-v)", "dim"))


def _verdicts(result: ValidationResult) -> RenderableType:
    assert result.metrics.oom is not None
    table = grid()
    for name, words in oom_rows(result.metrics.oom):
        table.add_row(Text(name), Text(words))
    return stack(Text("Out-of-memory verdicts", "bold"), table)


def _unpriced(name: str, unpriced: Sequence[Unpriced], *, verbose: bool) -> RenderableType:
    rows = reason_rows(unpriced)
    shown = rows if verbose else rows[:MOST_REASONS]
    table = _table(f"Not priced, {name}", REASON_HEAD, shown)
    hidden = len(rows) - len(shown)
    if not hidden:
        return table
    return stack(table, Text(f"and {hidden} more reasons (-v)", "dim"))


def _table(
    title: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, gap: int = 2
) -> RenderableType:
    return figures(title, head, rows, words=WORD_COLUMNS, folded=WORD_COLUMNS, gap=gap)
