"""Hints: what a line of the user's code reads from a tensor, where only a real run has the data."""

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from planner.errors import RequestError

HintValue = bool | int | float
"""A truth value, a number, or for a choice of elements their number or their share."""

_FORM = "A hint has the form FILE:LINE=VALUE, with true, false or a number as VALUE"

_EXAMPLE = "For example --hint model.py:57=true, or in Python hints={'model.py:57': True}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """What one line reads."""

    file: str
    """Path of the file or the end of it, such as "model.py"."""
    line: int
    """Line, counted from 1."""
    value: HintValue
    """What is read there."""

    @property
    def place(self) -> str:
        """Place as the user names it: "model.py:57"."""
        return f"{self.file}:{self.line}"

    def __str__(self) -> str:
        return f"{self.place}={json.dumps(self.value)}"

    def matches(self, file: str, line: int) -> bool:
        """Tell whether a line of a file is meant."""
        if line != self.line:
            return False
        wanted = PurePath(self.file).parts
        return PurePath(file).parts[-len(wanted) :] == wanted


def parse_hint(text: str) -> tuple[str, HintValue]:
    """Read FILE:LINE=VALUE.

    Returns:
        Place and value, for ``make_hints``.

    Raises:
        RequestError: It has another form.
    """
    place, _, spelled = text.rpartition("=")
    try:
        value = json.loads(spelled.strip().lower())
    except ValueError:
        value = None
    if not place or not isinstance(value, (bool, int, float)):
        raise RequestError(f"--hint {text}: this is no hint. {_FORM}.", hint=_EXAMPLE)
    return place.strip(), value


def read_hints(path: Path) -> dict[str, HintValue]:
    """Read a file of hints: a TOML or JSON table from places to values.

    Raises:
        RequestError: It cannot be read, or is no such table.
    """
    try:
        text = path.read_text(encoding="utf-8")
        table = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise RequestError(
            f"cannot read the hints {path}: {error.strerror}",
            hint='Give a file with lines such as "model.py:57" = true.',
        ) from error
    except ValueError as error:
        raise RequestError(
            f"{path} is no {'JSON' if path.suffix == '.json' else 'TOML'}: {error}",
            hint='Give a file with lines such as "model.py:57" = true.',
        ) from error
    if not isinstance(table, dict):
        raise RequestError(f"{path} holds no table of hints.", hint=_EXAMPLE)
    make_hints(table)
    return table


def make_hints(
    hints: Mapping[str, HintValue] | Iterable[tuple[str, HintValue]],
) -> tuple[Hint, ...]:
    """Make hints from places ("model.py:57") and values.

    Raises:
        RequestError: A place or a value has another form, or a place has two values.
    """
    pairs = hints.items() if isinstance(hints, Mapping) else hints
    made: dict[str, Hint] = {}
    for place, value in pairs:
        file, _, line = str(place).rpartition(":")
        if not file or not line.isdecimal() or not isinstance(value, (bool, int, float)):
            raise RequestError(f"hint {place}={value!r}: this is no hint. {_FORM}.", hint=_EXAMPLE)
        hint = Hint(file=file, line=int(line), value=value)
        if (known := made.setdefault(hint.place, hint)) != hint:
            raise RequestError(
                f"--hint {known} and --hint {hint} contradict each other.",
                hint="Keep one of them: a hint holds for every time the line is reached.",
            )
    return tuple(made.values())


def check_hints_used(hints: Iterable[Hint], used: Iterable[Hint], places: Iterable[str]) -> None:
    """Refuse hints that no line asked for.

    Args:
        hints: What the user gave.
        used: Those that a line asked for.
        places: Lines that read data which nothing but a hint can tell.

    Raises:
        RequestError: A hint was not used.
    """
    unused = [hint for hint in hints if hint not in set(used)]
    if not unused:
        return
    asking = list(dict.fromkeys(places))
    raise RequestError(
        f"--hint {unused[0]}: that line reads no data that only a real run has.",
        hint=f"Lines that do: {', '.join(asking)}." if asking else "No line of the model does.",
    )
