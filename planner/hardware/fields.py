"""Reading typed fields from profile files, with errors that name file, field and fault."""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from planner.errors import ProfileError
from planner.hardware.spec import NumberSource, Provenance

FORMAT = 1
"""Version of the profile format that this code reads."""

_NUMBER_FORM = '{ value = 79.1, provenance = "measured", source = "..." }'


def near_names(name: str, known: Iterable[str]) -> str:
    """Say which known names are near, or list them all."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3)
    return f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(names)}"


def read_toml(path: Path) -> dict[str, object]:
    """Read a profile file and check its format version.

    Raises:
        ProfileError: The file is missing, is not TOML, or has another format.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: is not a TOML file: {error}") from error
    if content.get("format") != FORMAT:
        raise ProfileError(
            f"{path}: field 'format' is {content.get('format')!r}, this version reads {FORMAT}",
            hint=f"write 'format = {FORMAT}' as the first line of a file of the present form",
        )
    return content


@dataclass(slots=True)
class FieldReader:
    """Takes the fields of one TOML table one by one; ``finish`` refuses what is left over.

    A number is an inline table of value, provenance and source, or plain: then it is stated by the
    user. What was taken is kept in ``numbers`` by the key, and in ``asked`` every key that the
    table may hold.
    """

    path: Path
    table: Mapping[str, object]
    prefix: str = ""
    numbers: dict[str, NumberSource] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)

    def error(self, key: str, fault: str, *, hint: str = "") -> ProfileError:
        """Make the error for a field."""
        return ProfileError(f"{self.path}: field '{self.prefix}{key}' {fault}", hint=hint)

    def text(self, key: str, choices: tuple[str, ...] = ()) -> str:
        """Take a string, one of ``choices`` where there are any."""
        value = self._take(key)
        if not isinstance(value, str) or not value:
            raise self.error(key, f"is {value!r}, not a string")
        if choices and value not in choices:
            raise self.error(key, f"is {value!r}", hint=f"known: {', '.join(choices)}")
        return value

    def number(self, key: str, *, least: float = 0.0, most: float = float("inf")) -> float:
        """Take a number and what is said of its source.

        ``least`` itself is legal only where it is 0 or more.
        """
        entry = self._entry(key)
        value = entry["value"]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"has the value {value!r}, not a number")
        if not least <= value <= most:
            raise self.error(key, f"is {value}, outside [{least:g}, {most:g}]")
        return float(value)

    def positive(self, key: str, *, most: float = float("inf")) -> float:
        """Take a number above zero."""
        value = self.number(key, most=most)
        if value == 0:
            raise self.error(key, "is 0, it must be above 0")
        return value

    def count(self, key: str) -> int:
        """Take a whole number above zero."""
        value = self.positive(key)
        if value != int(value):
            raise self.error(key, f"is {value}, not a whole number")
        return int(value)

    def tiles(self, key: str) -> tuple[tuple[int, int], ...]:
        """Take a list of (m, n) pairs."""
        value = self._entry(key)["value"]
        pairs = value if isinstance(value, list) else []
        sound = all(
            isinstance(pair, list) and len(pair) == 2 and all(_is_count(side) for side in pair)
            for pair in pairs
        )
        if not pairs or not sound:
            raise self.error(key, f"has the value {value!r}, not a list of [m, n] pairs")
        return tuple((m, n) for m, n in pairs)

    def curve(self, key: str) -> tuple[tuple[float, float], ...]:
        """Take a list of (size, value) pairs above zero, of rising sizes."""
        value = self._entry(key)["value"]
        pairs = value if isinstance(value, list) else []
        sound = all(
            isinstance(pair, list) and len(pair) == 2 and all(_is_positive(each) for each in pair)
            for pair in pairs
        )
        rising = sound and all(first[0] < second[0] for first, second in pairwise(pairs))
        if not pairs or not rising:
            raise self.error(
                key, f"has the value {value!r}, not a list of [size, value] with rising sizes"
            )
        return tuple((float(size), float(each)) for size, each in pairs)

    def has(self, key: str) -> bool:
        """Tell whether the field is there, which it may be."""
        self.asked.add(key)
        return key in self.table

    def tables(self, key: str) -> list[dict[str, object]]:
        """Take a list of one or more tables."""
        value = self._take(key)
        if not isinstance(value, list) or not value or not isinstance(value[0], dict):
            raise self.error(key, "is not a list of tables", hint=f"write [[{key}]] for each")
        return value

    def one_table(self, key: str) -> dict[str, object]:
        """Take a table."""
        value = self._take(key)
        if not isinstance(value, dict):
            raise self.error(key, "is not a table", hint=f"write [{key}]")
        return value

    def finish(self) -> dict[str, NumberSource]:
        """Refuse fields that nobody asked for; return provenance and source of all numbers."""
        for key in self.table:
            if key not in self.asked:
                raise self.error(key, "is unknown", hint=near_names(key, self.asked))
        return self.numbers

    def _take(self, key: str) -> object:
        self.asked.add(key)
        if key not in self.table:
            left = set(self.table) - self.asked
            near = difflib.get_close_matches(key, left, n=1)
            raise self.error(
                key, "is missing", hint=f"the file has '{near[0]}': misspelt?" if near else ""
            )
        return self.table[key]

    def _entry(self, key: str) -> dict[str, object]:
        entry = self._take(key)
        if isinstance(entry, int | float | list) and not isinstance(entry, bool):
            source = NumberSource(provenance=Provenance.STATED, source=self.path.name)
            self.numbers[key] = source
            return {"value": entry}
        if not isinstance(entry, dict) or set(entry) != {"value", "provenance", "source"}:
            raise self.error(
                key,
                "needs value, provenance and source",
                hint=f"write {key} = {_NUMBER_FORM}, or a plain number",
            )
        source, provenance = entry["source"], entry["provenance"]
        if not isinstance(source, str) or not source.strip():
            raise self.error(key, "has an empty source", hint="say where the number comes from")
        if provenance not in list(Provenance):
            raise self.error(
                key,
                f"has the provenance {provenance!r}",
                hint=f"known: {', '.join(Provenance)}",
            )
        self.numbers[key] = NumberSource(provenance=Provenance(provenance), source=source)
        return entry


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
