"""Pieces of screens: tables without lines, bars.

No box drawing: the same text reads well in a terminal, a pipe and a log.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from planner.units import format_s

WIDE_COLUMNS = 100
"""Width from which there is room."""


def grid() -> Table:
    """Make a table of a bold name and what belongs to it."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    return table


def titled(title: str | None, *, gap: int = 2, heads: bool = True) -> Table:
    """Make a table with a title (or none) and columns that are only blanks apart."""
    return Table(
        title=None if title is None else Text(title, "bold"),
        title_justify="left",
        box=None,
        padding=(0, gap, 0, 0),
        pad_edge=False,
        show_header=heads,
        header_style="",
    )


def figures(
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    words: Collection[str],
    folded: Collection[str],
    gap: int = 2,
) -> RenderableType:
    """Make a table whose numbers stand on the right, under a title of any length.

    Args:
        title: Title.
        head: Names of the columns; a column without a name holds words.
        rows: Cells.
        words: Columns of words; the others are numbers.
        folded: Columns that fold where there is no room.
        gap: Blanks between columns.
    """
    table = titled(None, gap=gap)
    for name in head:
        table.add_column(
            Text(name, "dim"),
            justify="left" if name in words or not name else "right",
            no_wrap=name not in folded,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return stack(Text(title, "bold"), table)


def closing(files: Sequence[Path], phases_s: Mapping[str, float]) -> RenderableType:
    """Say what was written and how long it took, wall time by phase."""
    parts: list[RenderableType] = []
    if files:
        parts.append(Text(f"Wrote {', '.join(map(str, files))}"))
    phases = ", ".join(f"{phase} {format_s(seconds)}" for phase, seconds in phases_s.items())
    parts.append(Text(f"Took {format_s(sum(phases_s.values()))}: {phases}", "dim"))
    return stack(*parts)


def stack(*parts: RenderableType) -> RenderableType:
    """Put parts under each other without empty lines."""
    table = Table.grid()
    table.add_column()
    for part in parts:
        table.add_row(Padding(part, 0))
    return table


def draw_bar(share: float, cells: int) -> str:
    """Draw a share as a bar of characters."""
    filled = min(cells, round(share * cells))
    return "#" * filled + "-" * (cells - filled)
