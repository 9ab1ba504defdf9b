"""Lists of numbers as people write them: ranges, prices, counts with a suffix."""

import math
from collections.abc import Iterable, Mapping

from planner.errors import RequestError

MOST_VALUES = 200
"""Of one list: more are a slip."""

_SUFFIXES = {"k": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def whole_numbers(option: str, text: str) -> tuple[int, ...]:
    """Read "8", "8,16,24", "8..64" (doubled: 8, 16, 32, 64) or "8..64:8" (in steps of 8).

    The end of a range is always in it.

    Args:
        option: Where it was written, for messages: "--gpus".
        text: What was written.

    Returns:
        The numbers in the order given, each once.

    Raises:
        RequestError: It has none of these forms, or a number below 1, or too many numbers.
    """
    numbers: dict[int, None] = {}
    for part in text.split(","):
        first, dots, rest = part.strip().partition("..")
        end, colon, step = rest.partition(":")
        named = [first, *([end] if dots else []), *([step] if colon else [])]
        values = [_whole(option, text, each) for each in named]
        numbers |= dict.fromkeys(values if not dots else _range(option, text, *values))
    if len(numbers) > MOST_VALUES:
        raise RequestError(
            f"{option} {text}: these are {len(numbers)} values, and {MOST_VALUES} are the most",
            hint="Take larger steps.",
        )
    return tuple(numbers)


def _range(option: str, text: str, first: int, end: int, step: int = 0) -> Iterable[int]:
    if end < first:
        raise RequestError(
            f"{option} {text}: the range ends at {end}, below its first number {first}",
            hint=f"For example {option} {end}..{first}.",
        )
    if step:
        return (*range(first, end, step)[: MOST_VALUES + 1], end)
    doubled = [first << power for power in range(end.bit_length()) if first << power < end]
    return (*doubled, end)


def _whole(option: str, text: str, part: str) -> int:
    digits = part.strip()
    if not (digits.isascii() and digits.isdigit()) or int(digits) < 1:
        raise RequestError(
            f"{option} {text}: {part.strip() or 'nothing'} is not a whole number of at least 1",
            hint=f"For example {option} 8, {option} 8,16,32, {option} 8..1024 (doubled) or "
            f"{option} 8..64:8 (in steps of 8).",
        )
    return int(digits)


def count(option: str, text: str) -> float:
    """Read a count: "15T", "300B", "1.5e12".

    Raises:
        RequestError: It is no number above 0.
    """
    number = text.strip()
    scale = _SUFFIXES.get(number[-1:], 1.0)
    try:
        value = float(number[:-1] if scale > 1 else number) * scale
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise RequestError(
            f"{option} {text}: it is a count above 0",
            hint=f"For example {option} 15T, {option} 300B or {option} 1e12.",
        )
    return value


def prices(option: str, texts: Iterable[str], clusters: Iterable[str]) -> Mapping[str, float]:
    """Read prices by cluster: "2.5" for all of them, "h100-sxm=2.5" for one.

    Raises:
        RequestError: One has neither form, or is of a cluster that is not asked about.
    """
    known, found = tuple(clusters), dict[str, float]()
    for text in texts:
        name, equals, number = text.rpartition("=")
        try:
            price = float(number)
        except ValueError:
            price = math.nan
        if not (math.isfinite(price) and price > 0):
            raise RequestError(
                f"{option} {text}: it is a price above 0 of one GPU for one hour",
                hint=f"For example {option} 2.5 or {option} {known[0]}=2.5.",
            )
        if equals and name not in known:
            raise RequestError(
                f"{option} {text}: {name} is none of the clusters asked about",
                hint=f"They are {', '.join(known)}.",
            )
        found |= {name: price} if equals else dict.fromkeys(known, price)
    return found
