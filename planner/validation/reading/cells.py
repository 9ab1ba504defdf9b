"""The cells of one row of a table, read with the column's name in every complaint."""

import math
from collections.abc import Callable, Mapping
from typing import TypeVar

from planner.validation.reading.cell_words import NotModelledError

Value = TypeVar("Value")

YES_NO = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}
"""Truth value by its spelling, in small letters."""


class BadCellError(ValueError):
    """A cell is wrong, or contradicts another one."""

    def __init__(self, column: str, words: str) -> None:
        """Keep the column.

        Args:
            column: Where.
            words: What is wrong, and what would be right.
        """
        super().__init__(words)
        self.column = column


class Cells:
    """The cells of one row as text; columns that the table does not have are empty."""

    def __init__(self, cells: Mapping[str, object]) -> None:
        """Keep the cells; NaN and None are empty."""
        self._texts = {name: _text(cell) for name, cell in cells.items()}
        self.limits: list[str] = []
        """What the row describes and the model has no words for."""

    def text(self, column: str) -> str:
        """Give a cell as it stands, without blanks around it; "" where it is empty."""
        return self._texts.get(column, "")

    def stated(self, column: str) -> str:
        """Give the text of a cell that must not be empty.

        Raises:
            BadCellError: It is.
        """
        text = self.text(column)
        if not text:
            raise BadCellError(column, "is empty")
        return text

    def count(self, column: str, *, empty: int | None = None) -> int:
        """Read a whole number of at least 1; "64.0" is one.

        Args:
            column: Which.
            empty: What an empty cell stands for, None where it must not be empty.

        Raises:
            BadCellError: It is no such number.
        """
        if empty is not None and not self.text(column):
            return empty
        text = self.stated(column)
        number = _number(column, text)
        if number != int(number) or number < 1:
            raise BadCellError(column, f"{text} is no whole number of at least 1")
        return int(number)

    def optional_count(self, column: str) -> int | None:
        """Read a whole number of at least 1; None where the cell is empty.

        Raises:
            BadCellError: It is no such number.
        """
        return self.count(column) if self.text(column) else None

    def quantity(self, column: str) -> float | None:
        """Read a number above 0; None where the cell is empty.

        Raises:
            BadCellError: It is no such number.
        """
        text = self.text(column)
        if not text:
            return None
        number = _number(column, text)
        if number <= 0:
            raise BadCellError(column, f"{text} is not above 0")
        return number

    def truth(self, column: str) -> bool:
        """Read yes or no.

        Raises:
            BadCellError: It is neither.
        """
        text = self.stated(column)
        if text.lower() not in YES_NO:
            raise BadCellError(column, f"{text} is neither yes nor no")
        return YES_NO[text.lower()]

    def word(self, read: Callable[[], Value], otherwise: Value) -> Value:
        """Read a word; what is not modelled is noted in ``limits``.

        Args:
            read: Reads it.
            otherwise: Stands in for what is not modelled; the row is not priced then.
        """
        try:
            return read()
        except NotModelledError as limit:
            self.limits.append(str(limit))
            return otherwise


def _text(cell: object) -> str:
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return ""
    return str(cell).strip()


def _number(column: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise BadCellError(column, f"{text} is no number") from None
    if not math.isfinite(number):
        raise BadCellError(column, f"{text} is no finite number")
    return number
