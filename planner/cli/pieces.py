"""Pieces of screens: tables without lines, bars.

No box drawing: the same text reads well in a terminal, a pipe and a log.
"""

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text


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
