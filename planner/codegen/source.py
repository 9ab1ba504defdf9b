"""Values as Python source."""

from collections.abc import Iterable, Sequence
from itertools import groupby

LINE_LENGTH = 100
"""Longest line of a script."""


def quote(text: str) -> str:
    """Write a text in double quotes."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def tuple_of(items: Iterable[str]) -> str:
    """Write a tuple on one line."""
    listed = list(items)
    return f"({listed[0]},)" if len(listed) == 1 else f"({', '.join(listed)})"


def wrapped_tuple(items: Sequence[str], *, column: int, indent: int) -> str:
    """Write a tuple that starts at a column, an item a line where it does not fit on one.

    Args:
        items: Its items.
        column: Where it starts; at most one character follows it.
        indent: Where its last line starts if it takes several.
    """
    one_line = tuple_of(items)
    if column + len(one_line) + 1 <= LINE_LENGTH:
        return one_line
    inner = "".join(f"{' ' * (indent + 4)}{item},\n" for item in items)
    return f"(\n{inner}{' ' * indent})"


def runs_of(words: Sequence[str]) -> str:
    """Write a tuple of words as a sum of repetitions."""
    runs = [(word, len(list(group))) for word, group in groupby(words)]
    parts = [f'("{word}",)' + (f" * {count}" if count > 1 else "") for word, count in runs]
    return " + ".join(parts)


def range_of(numbers: Sequence[int]) -> str:
    """Write ascending numbers, as a range where they are one."""
    first, end = numbers[0], numbers[-1] + 1
    if list(numbers) == list(range(first, end)):
        return f"range({end})" if first == 0 else f"range({first}, {end})"
    return tuple_of(str(number) for number in numbers)


def call_of(name: str, arguments: Sequence[str], *, indent: int) -> str:
    """Write a call that starts at a column and is followed by a comma, on one line if it fits."""
    one_line = f"{name}({', '.join(arguments)})"
    if indent + len(one_line) + 1 <= LINE_LENGTH:
        return one_line
    inner = "".join(f"{' ' * (indent + 4)}{argument},\n" for argument in arguments)
    return f"{name}(\n{inner}{' ' * indent})"
