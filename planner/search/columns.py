"""Columns of the stage ILP: runs of units with the recomputation that fits.

A stage of a configuration with one stage per rank needs, for each run of units, only the
cheapest recomputation that fits. Where a rank holds several stages they compete for its memory:
each run keeps several columns there, one for each kind of recomputation of all its blocks.

Finding the mix is a multiple-choice knapsack: blocks of one structure are alike, so that only
counts per kind matter, and the Pareto sets of the structures are merged.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from planner.cost.stage_table import StageTable
from planner.cost.unit_pricing import CHECKPOINTING


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Recomputation of a run of units."""

    kinds: tuple[str, ...]
    """"none", "selective" or "full" for each unit."""
    recompute_s: float
    """Time per microbatch."""
    kept_bytes: int
    """Activations kept per microbatch."""
    temporary_bytes: float
    """Highest transient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One way to fill one stage."""

    first: int
    """First unit."""
    end: int
    """One past the last unit."""
    mix: Mix
    """Recomputation."""
    microbatch_s: float
    """Time of one microbatch."""
    step_s: float
    """Exposed traffic and optimiser, once per step."""
    static_bytes: float
    """Parameters, gradients, optimiser states and buffers."""


MixCache = dict[tuple[object, ...], tuple[Mix, ...]]
"""Pareto sets by the structures of a run and whether it touches the ends."""


class ColumnMaker:
    """Makes the columns of one configuration."""

    def __init__(
        self, table: StageTable, *, fixed_kind: str | None, known_mixes: "MixCache"
    ) -> None:
        """Keep the table.

        Args:
            table: Prices of the configuration.
            fixed_kind: Recomputation of all blocks where the request fixes it.
            known_mixes: Mixes found before for the same priced units; new ones are added.
        """
        self.table = table
        self._kinds = CHECKPOINTING if fixed_kind is None else (fixed_kind,)
        self._last = len(table.units) - 1
        self._mixes = known_mixes

    def static_bytes(self, first: int, end: int) -> float:
        """Memory that does not depend on recomputation, the reserve apart."""
        table = self.table
        return 4 * table.sharded_parameter_bytes(first, end) + table.buffer_bytes(first, end)

    def uniform_mixes(self, first: int, end: int) -> list[Mix]:
        """One kind for all blocks of a run: what a stage that shares its rank chooses from."""
        fixed = [self._fixed_mix(first, end, kind) for kind in self._kinds]
        fixed.sort(key=lambda mix: (mix.recompute_s, mix.kept_bytes))
        kept: list[Mix] = []
        for mix in fixed:
            if all(
                mix.kept_bytes < other.kept_bytes or mix.temporary_bytes < other.temporary_bytes
                for other in kept
            ):
                kept.append(mix)
        return kept

    def mixes(self, first: int, end: int) -> tuple[Mix, ...]:
        """Pareto set of recomputations of a run: fastest first, each next one smaller."""
        structures = tuple(unit.structure for unit in self.table.units[first:end])
        key = (structures, first == 0, end == self._last + 1)
        if key not in self._mixes:
            self._mixes[key] = tuple(self._pareto(first, end))
        return self._mixes[key]

    def cheapest(
        self, first: int, end: int, *, in_flight: int, capacity_bytes: float
    ) -> Mix | None:
        """The fastest recomputation of a run that fits a rank of its own."""
        room = capacity_bytes - self.static_bytes(first, end)
        shared = in_flight * self.table.shared_bytes(first, end)
        fastest = self._fixed_mix(first, end, self._kinds[0])
        if in_flight * fastest.kept_bytes + shared + fastest.temporary_bytes <= room:
            return fastest
        for mix in self.mixes(first, end):
            if in_flight * mix.kept_bytes + shared + mix.temporary_bytes <= room:
                return mix
        return None

    def column(self, first: int, end: int, mix: Mix) -> Column:
        """Price a run with its recomputation chosen."""
        seconds = self.table.seconds_with(first, end, mix.recompute_s)
        return Column(
            first=first,
            end=end,
            mix=mix,
            microbatch_s=seconds.microbatch_s,
            step_s=seconds.step_comm_s + seconds.optimizer_s,
            static_bytes=self.static_bytes(first, end),
        )

    def _fixed_mix(self, first: int, end: int, kind: str) -> Mix:
        """The mix with one kind for all blocks."""
        blocks = [i for i in range(first, end) if i not in (0, self._last)]
        point = _Point(
            recompute_s=sum(self.table.recompute_s(i, kind) for i in blocks),
            kept_bytes=sum(self.table.units[i].activation_bytes[kind] for i in blocks),
            temporary_bytes=0.0,
            choices=(),
        )
        return self._finished(first, end, dict.fromkeys(blocks, kind), point)

    def _pareto(self, first: int, end: int) -> list[Mix]:
        """Merge the choices of each structure and keep what nothing else beats."""
        if len(self._kinds) == 1:
            return [self._fixed_mix(first, end, self._kinds[0])]
        blocks: dict[str, list[int]] = {}
        for index in range(first, end):
            if index not in (0, self._last):
                blocks.setdefault(self.table.units[index].structure, []).append(index)
        front = [_Point(recompute_s=0.0, kept_bytes=0, temporary_bytes=0.0, choices=())]
        for indices in blocks.values():
            choices = [self._alike(indices[0], counts) for counts in _counts(len(indices))]
            front = _prune(point.plus(choice) for point in front for choice in choices)
        mixes = []
        for point in front:
            kinds: dict[int, str] = {}
            for indices, counts in zip(blocks.values(), point.choices, strict=True):
                kinds.update(zip(indices, _in_order(counts), strict=True))
            mixes.append(self._finished(first, end, kinds, point))
        return mixes

    def _alike(self, index: int, counts: tuple[int, ...]) -> "_Point":
        """Time and memory of alike blocks with so many of each kind."""
        unit = self.table.units[index]
        used = [(kind, n) for kind, n in zip(CHECKPOINTING, counts, strict=True) if n]
        return _Point(
            recompute_s=sum(self.table.recompute_s(index, kind) * n for kind, n in used),
            kept_bytes=sum(unit.activation_bytes[kind] * n for kind, n in used),
            temporary_bytes=max((unit.temporary_bytes[kind] for kind, _ in used), default=0),
            choices=(counts,),
        )

    def _finished(self, first: int, end: int, kinds: dict[int, str], point: "_Point") -> Mix:
        """Add prologue and epilogue, which are not recomputed, and the transients."""
        ends = {0, self._last} & set(range(first, end))
        listed = tuple(kinds.get(index, "none") for index in range(first, end))
        kept = sum(self.table.units[index].activation_bytes["none"] for index in ends)
        return Mix(
            kinds=listed,
            recompute_s=point.recompute_s,
            kept_bytes=point.kept_bytes + kept,
            temporary_bytes=self.table.temporary_bytes(first, end, listed),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """A choice of kinds for some structures."""

    recompute_s: float
    kept_bytes: int
    temporary_bytes: float
    choices: tuple[tuple[int, ...], ...]
    """Per structure: how many blocks of each kind, in the order of CHECKPOINTING."""

    def plus(self, other: "_Point") -> "_Point":
        """Both choices together."""
        return _Point(
            recompute_s=self.recompute_s + other.recompute_s,
            kept_bytes=self.kept_bytes + other.kept_bytes,
            temporary_bytes=max(self.temporary_bytes, other.temporary_bytes),
            choices=self.choices + other.choices,
        )


def _counts(number: int) -> Iterator[tuple[int, ...]]:
    """All ways to give ``number`` alike blocks one kind each."""
    for full in range(number + 1):
        for selective in range(number + 1 - full):
            yield number - full - selective, selective, full


def _in_order(counts: tuple[int, ...]) -> list[str]:
    """Kinds of alike blocks in model order; the earliest recompute most."""
    return [
        kind
        for kind, number in zip(reversed(CHECKPOINTING), reversed(counts), strict=True)
        for _ in range(number)
    ]


def _prune(points: Iterator[_Point]) -> list[_Point]:
    """Points that no other beats in time, kept bytes and transients, fastest first."""
    front: list[_Point] = []
    best: dict[float, int] = {}
    for point in sorted(points, key=lambda p: (p.recompute_s, p.kept_bytes, p.temporary_bytes)):
        beaten = any(
            temporary <= point.temporary_bytes and kept <= point.kept_bytes
            for temporary, kept in best.items()
        )
        if not beaten:
            front.append(point)
            best[point.temporary_bytes] = point.kept_bytes
    return front
