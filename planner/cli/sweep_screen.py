"""A sweep as a person reads it."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from planner.cli.pieces import WIDE_COLUMNS, grid, stack, titled
from planner.cli.terminal import write_answer
from planner.questions.sweep import Sweep
from planner.questions.sweep_view import SweepView, sweep_view

_LEAST_LAYOUT = 16
"""Width that a layout has in any case."""

_LESS_ASKED = ["memory", "MFU", "scaling"]
"""Columns that make room, the first of them first."""


def print_sweep(console: Console, sweep: Sweep, *, files: Sequence[Path]) -> None:
    """Print the points, the one that is recommended, and how to get its script.

    Args:
        console: Where to.
        sweep: What to show.
        files: Files that were written.
    """
    view = sweep_view(sweep)
    sections: list[RenderableType] = [Text(view.title, "bold")]
    if view.rows:
        sections.append(_points(console, view))
    if view.refusals:
        sections.append(stack(*(Text(refusal) for refusal in view.refusals)))
    sections.append(_end(view))
    if files:
        sections.append(Text(f"Wrote {', '.join(map(str, files))}"))
    write_answer(console, sections)
    if view.command:
        console.file.write(f"Script {view.command}\n")


def _points(console: Console, view: SweepView) -> RenderableType:
    """The table, on narrow screens without what is not asked about first."""
    gap = 2 if console.width >= WIDE_COLUMNS else 1
    widths = {
        name: max(map(len, (*_pieces(name), *column)))
        for name, column in zip(view.head, zip(*view.rows, strict=True), strict=True)
    }
    widths["layout"] = _LEAST_LAYOUT
    hidden: list[str] = []
    while hidden != _LESS_ASKED and sum(widths.values()) + gap * len(widths) > console.width:
        hidden.append(_LESS_ASKED[len(hidden)])
        del widths[hidden[-1]]
    table = titled(None, gap=gap)
    for name in widths:
        is_layout = name == "layout"
        table.add_column(
            Text("\n".join(_pieces(name)), "dim"),
            justify="left" if is_layout else "right",
            no_wrap=not is_layout,
        )
    for row in view.rows:
        cells = dict(zip(view.head, row, strict=True))
        table.add_row(*(Text(cells[name]) for name in widths))
    note = [Text(f"{', '.join(hidden)}: on a wider screen, and in --out", "dim")] if hidden else []
    return stack(table, *note)


def _pieces(name: str) -> list[str]:
    """Lines of a column's head."""
    return name.replace(" per ", " per|").replace("10^9 ", "10^9|").split("|")


def _end(view: SweepView) -> RenderableType:
    table = grid()
    if view.pick:
        table.add_row(Text("Pick", "bold"), Text(view.pick, "bold green"))
    return stack(table, *(Text(note, "dim") for note in view.notes))
