"""What a user assumes of cells that a table of runs leaves open."""

from collections.abc import Mapping

import pandas as pd

from planner.errors import RequestError
from planner.framework.profiles import list_frameworks, load_framework
from planner.hardware.fields import near_names

MEASURED = ("step_time_s", "peak_mem_gib", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu")
"""Columns of what was measured: nothing is assumed of them."""


def check_assumed(assume: Mapping[str, str], columns: tuple[str, ...]) -> None:
    """Refuse what cannot be assumed.

    Args:
        assume: Values by column.
        columns: Those of a table.

    Raises:
        RequestError: A column is unknown or holds measurements, or a value is empty.
    """
    known = [column for column in columns if column not in MEASURED]
    for column, value in assume.items():
        if column in MEASURED:
            raise RequestError(
                f"--assume {column}={value}: a measurement cannot be assumed",
                hint="Leave the cell empty: the row is priced and not compared.",
            )
        if column not in known:
            raise RequestError(
                f"--assume {column}={value}: there is no such column",
                hint=near_names(column, known),
            )
        if not value.strip():
            raise RequestError(f"--assume {column}=: the value is empty", hint="COLUMN=VALUE")


def with_assumed(
    frame: pd.DataFrame, assume: Mapping[str, str]
) -> tuple[pd.DataFrame, list[tuple[str, ...]]]:
    """Fill the empty cells of some columns, and frameworks without a profile.

    Args:
        frame: A table, rows numbered from 0.
        assume: Values by column; a column that the table lacks is added.

    Returns:
        The table, and what was assumed of each row.
    """
    filled = frame.copy()
    words: list[list[str]] = [[] for _ in range(len(frame))]
    for column, value in assume.items():
        cells = filled[column].astype(object) if column in filled else None
        cells = pd.Series([None] * len(filled), dtype=object) if cells is None else cells
        is_open = cells.isna() | (cells.astype(str).str.strip() == "")
        if column == "framework":
            is_open |= ~cells.astype(str).str.strip().isin(_known_frameworks())
        filled[column] = cells.mask(is_open, value)
        for row in filled.index[is_open]:
            words[row].append(f"{column} {value} (assumed)")
    return filled, [tuple(each) for each in words]


def _known_frameworks() -> set[str]:
    """What tables call the frameworks that have a profile."""
    profiles = [load_framework(name) for name in list_frameworks()]
    matched = {match.framework for profile in profiles for match in profile.matches}
    return {*list_frameworks(), *matched}
