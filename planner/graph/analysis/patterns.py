"""Kinds of blocks, and the pattern in which a model repeats them.

Blocks of the same structure are one kind and get one letter. The sequence of letters is written
with repeats: "126 A", "3 A + 58 B", "8 x (A A A B) + 2 A".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from planner.graph.operator_graph import OperatorGraph, StorageKind, Unit, UnitKind

MOST_REPEATED = 64
"""Longest group of letters that is looked for as a repeated one."""

MOST_WRITTEN_OUT = 4
"""Letters in a repeated group up to which it is written letter by letter."""

Cost = tuple[int, int]
"""Symbols and terms of a description; the smaller is the better one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A group of letters that repeats."""

    count: int
    """How often."""
    letters: tuple[str, ...]
    """The group: a single letter, or several that come one after the other."""

    def __str__(self) -> str:
        if len(self.letters) == 1:
            return self.letters[0] if self.count == 1 else f"{self.count} {self.letters[0]}"
        return f"{self.count} x ({_group_words(self.letters)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPattern:
    """A sequence of letters as repeats, in the shortest way."""

    terms: tuple[Term, ...]
    """One after the other."""

    def expand(self) -> tuple[str, ...]:
        """Write every letter out."""
        return tuple(
            letter for term in self.terms for _ in range(term.count) for letter in term.letters
        )

    def __str__(self) -> str:
        return " + ".join(map(str, self.terms))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKind:
    """Blocks that compute the same; all sizes are those of one block and one microbatch.

    The prologue and the epilogue have the same form, with their name in place of the letter.
    """

    letter: str
    """Its name in the pattern: A, B, ..., Z, AA, ..."""
    is_block: bool
    """False for the prologue and the epilogue."""
    count: int
    """Blocks of this kind."""
    first: str
    """Name of the first of them."""
    num_parameters: int
    """Elements of the parameters that it reads."""
    num_ops: int
    """Ops, forward and backward."""
    forward_flop: int
    """FLOPs of forward."""
    backward_flop: int
    """FLOPs of backward."""
    saved_bytes: int
    """Bytes that each further block of this kind keeps for backward."""


def unit_kinds(graph: OperatorGraph) -> tuple[BlockKind, ...]:
    """Group all units by what they compute: prologue, kinds of blocks by first block, epilogue."""
    letters = unit_letters(graph)
    groups: dict[str, list[Unit]] = {}
    for unit, letter in zip(graph.units, letters, strict=True):
        groups.setdefault(letter, []).append(unit)
    saved = saved_bytes_by_unit(graph)
    return tuple(
        # Of the last block, because the first one also keeps what all of them share.
        unit_sizes(graph, letter, units, saved[units[-1].index])
        for letter, units in groups.items()
    )


def block_kinds(graph: OperatorGraph) -> tuple[BlockKind, ...]:
    """Group the blocks of a graph by structure, in order of appearance."""
    return tuple(kind for kind in unit_kinds(graph) if kind.is_block)


def unit_letters(graph: OperatorGraph) -> tuple[str, ...]:
    """Give every block the letter of its kind, other units their name."""
    number: dict[str, int] = {}
    return tuple(
        letter_name(number.setdefault(unit.structure, len(number)))
        if unit.kind is UnitKind.BLOCK
        else unit.name
        for unit in graph.units
    )


def block_pattern(graph: OperatorGraph) -> BlockPattern:
    """Find the pattern of a graph's blocks; it has no terms where there are no blocks."""
    units = zip(graph.units, unit_letters(graph), strict=True)
    return find_pattern([letter for unit, letter in units if unit.kind is UnitKind.BLOCK])


def saved_bytes_by_unit(graph: OperatorGraph) -> tuple[int, ...]:
    """Divide ``graph.saved_bytes`` among the units: a storage counts where it is first saved."""
    saved = [0] * len(graph.units)
    seen: set[int] = set()
    for unit in graph.units:
        for op_id in unit.forward_ops:
            op = graph.nodes[op_id]
            for value in (*op.saved_inputs, *op.saved_outputs):
                storage = graph.storages[graph.values[value].storage]
                if storage.id not in seen and storage.kind is StorageKind.ACTIVATION:
                    seen.add(storage.id)
                    saved[unit.index] += storage.size_bytes
    return tuple(saved)


def unit_sizes(
    graph: OperatorGraph, letter: str, units: Sequence[Unit], saved_bytes: int
) -> BlockKind:
    """Give the sizes of units that compute the same."""
    last = units[-1]
    return BlockKind(
        letter=letter,
        is_block=last.kind is UnitKind.BLOCK,
        count=len(units),
        first=units[0].name,
        num_parameters=sum(graph.parameters[each].num_elements for each in last.parameters),
        num_ops=len(last.forward_ops) + len(last.backward_ops),
        forward_flop=sum(graph.nodes[op].flop for op in last.forward_ops),
        backward_flop=sum(graph.nodes[op].flop for op in last.backward_ops),
        saved_bytes=saved_bytes,
    )


def find_pattern(letters: Sequence[str]) -> BlockPattern:
    """Describe a sequence by repeats with the fewest symbols, then with the fewest terms.

    A run of one letter takes two symbols (count and letter), one where its count is 1. A repeated
    group takes two and those of its own runs. Groups of up to ``MOST_REPEATED`` letters are found;
    a group is not divided into groups again.

    For each end the search keeps the best start of a repetition with each period, so that n
    letters take n * ``MOST_REPEATED`` steps.
    """
    if letters and len(set(letters)) == 1:
        return BlockPattern(terms=(Term(count=len(letters), letters=(letters[0],)),))
    best: list[Cost] = [(0, 0)]
    back: list[tuple[int, int]] = [(0, 0)]  # start of the last term, its period
    starts: dict[tuple[int, int], int] = {}  # by period and end: best start of a repetition
    for end in range(1, len(letters) + 1):
        cost, terms = best[end - 1]
        best.append((cost + 1, terms + 1))
        back.append((end - 1, 1))
        for period in range(1, min(MOST_REPEATED, end // 2) + 1):
            if letters[end - period : end] != letters[end - 2 * period : end - period]:
                continue
            start = end - 2 * period
            longer = starts.get((period, end - period))
            if longer is not None and best[longer] <= best[start]:
                start = longer
            starts[period, end] = start
            group = 0 if period == 1 else 1
            cost, terms = best[start]
            found = (cost + 1 + group + _symbols(letters[end - period : end]), terms + 1)
            if found < best[end]:
                best[end], back[end] = found, (start, period)
    return BlockPattern(terms=_terms(letters, back))


def letter_name(number: int) -> str:
    """Name the kinds A to Z, then AA, AB and so on, as spreadsheets do."""
    name = ""
    number += 1
    while number:
        number, place = divmod(number - 1, 26)
        name = chr(ord("A") + place) + name
    return name


def _symbols(letters: Sequence[str]) -> int:
    """Count the symbols of a group's runs."""
    return sum(1 if len(list(run)) == 1 else 2 for _, run in groupby(letters))


def _terms(letters: Sequence[str], back: Sequence[tuple[int, int]]) -> tuple[Term, ...]:
    """Follow the best starts from the end to the beginning."""
    terms: list[Term] = []
    end = len(letters)
    while end:
        start, period = back[end]
        terms.append(
            Term(count=(end - start) // period, letters=tuple(letters[start : start + period]))
        )
        end = start
    return tuple(reversed(terms))


def _group_words(letters: Sequence[str]) -> str:
    if len(letters) <= MOST_WRITTEN_OUT:
        return " ".join(letters)
    runs = [(letter, len(list(run))) for letter, run in groupby(letters)]
    return " + ".join(letter if count == 1 else f"{count} {letter}" for letter, count in runs)
