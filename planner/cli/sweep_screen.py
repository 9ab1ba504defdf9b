"""A sweep as a person reads it."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from planner.cli.pieces import closing, grid, stack, titled
from planner.cli.terminal import write_answer
from planner.questions.sweep import Sweep
from planner.questions.sweep_view import SweepView, sweep_view


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
        sections.append(_points(view))
    if view.refusals:
        sections.append(stack(*(Text(refusal) for refusal in view.refusals)))
    sections.append(_end(view))
    if files:
        sections.append(closing(files, {}))
    write_answer(console, sections)
    if view.command:
        console.file.write(f"Script {view.command}\n")


def _points(view: SweepView) -> RenderableType:
    table = titled(None)
    for name in view.head:
        is_layout = name == "layout"
        table.add_column(
            Text(name, "dim"),
            justify="left" if is_layout else "right",
            no_wrap=not is_layout and " per " not in name,
            overflow="fold",
        )
    for row in view.rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _end(view: SweepView) -> RenderableType:
    table = grid()
    if view.pick:
        table.add_row(Text("Pick", "bold"), Text(view.pick, "bold green"))
    return stack(table, *(Text(note, "dim") for note in view.notes))
