"""The units of a model in order: what they compute, and what that costs.

``ModelWork`` is counted from a graph once. Priced on a device it becomes ``ModelUnits``, from which
the stages of any configuration are summed up (``planner.cost.stage_costs``).
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import attrgetter

import numpy as np

from planner.cost.node_pricing import RankSpec
from planner.cost.unit_pricing import PricedUnit, master_bytes, price_unit
from planner.cost.unit_work import UnitWork
from planner.graph.analysis.shared import SharedActivation
from planner.units import DTYPE_BYTES

_OF_ROOT = ("trained_bytes", "frozen_bytes", "gathered_bytes")
_SUMMED = (
    *_OF_ROOT,
    *("waiting_gradient_bytes", "released_bytes", "experts_trained_bytes", "experts_frozen_bytes"),
    "pinned_bytes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedWeight:
    """A weight that several units read: once on each stage that holds some of them."""

    units: tuple[int, ...]
    """Its readers, in order."""
    trained_bytes: int
    """Bytes on a tp rank in the optimiser's dtype, 0 where it is frozen."""
    gathered_bytes: int
    """Bytes on a tp rank in the compute dtype."""

    @property
    def frozen_bytes(self) -> int:
        """Bytes that a tp rank holds where it is frozen: in the compute dtype."""
        return 0 if self.trained_bytes else self.gathered_bytes

    def copies(self, units: Collection[int]) -> int:
        """How often it is counted too much in a set of units."""
        return max(0, sum(unit in units for unit in self.units) - 1)


@dataclass(frozen=True, kw_only=True)
class ModelUnits:
    """The priced units of a model in order, for one tp, stream layout and microbatch size."""

    units: tuple[PricedUnit, ...]
    """Prologue, blocks, epilogue; the epilogue may come as two, head and loss."""
    entering_bytes: tuple[int, ...]
    """Bytes of one microbatch on a rank that a stage receives which begins with each unit; 0
    where no stage can."""
    tied: tuple[TiedWeight, ...]
    """Weights that several units read, counted in each of them."""
    shared: tuple[SharedActivation, ...]
    """Activations that units share, counted in none of them."""
    entering_tensors: tuple[int, ...] = ()
    """Tensors that these bytes are, sent one by one; () where it is one everywhere."""
    matmul_flop: tuple[int, ...] = ()
    """FLOPs of each unit's products with parameters: what frameworks divide models by."""
    received_bytes: tuple[tuple[int, ...], ...] = ()
    """Of what enters each unit, the bytes that it keeps and counts itself, under each of
    RECOMPUTATIONS; 0 where no stage can begin."""
    sent_parts: int = 1
    """Parts in which a rank sends what enters a unit."""
    epilogue_units: int = 1
    """Units of the epilogue: 1, or 2 where a stage may hold the loss alone."""
    buffer_bytes: int = 0
    """The model's own buffers, all of which every rank has."""
    held_by_code: tuple[tuple[int, frozenset[int]], ...] = ()
    """Bytes of a microbatch that the code around units holds in every stage, and the units that
    keep and count the same: inputs, and constants that are made of them."""

    @cached_property
    def blocks(self) -> range:
        """Units that are blocks: what recomputes, and what FSDP gathers apart from its root."""
        return range(1, max(1, len(self.units) - self.epilogue_units))

    @cached_property
    def byte_sums(self) -> Mapping[str, Sequence[int]]:
        """Prefix sums over the units of what stages hold of each, by the name of its field.

        With ``root_`` before it, of what is in none of their blocks alone.
        """
        sizes = {name: [getattr(unit, name) for unit in self.units] for name in _SUMMED}
        for name in _OF_ROOT:
            sizes[f"root_{name}"] = [
                getattr(unit, f"outer_{name}" if index in self.blocks else name)
                for index, unit in enumerate(self.units)
            ]
        return {name: list(accumulate(each, initial=0)) for name, each in sizes.items()}

    @cached_property
    def unit_sums(self) -> "UnitSums":
        """Makes prefix sums of anything else."""
        return UnitSums(self)

    @cached_property
    def known_sums(self) -> dict[Hashable, Mapping[str, Sequence[float]]]:
        """Such sums by all that they depend on besides; who makes some puts them here."""
        return {}

    def blocks_inside(self, first: int, end: int) -> tuple[PricedUnit, ...]:
        """The blocks of a run, each of those that are priced as one once."""
        run = max(first, self.blocks.start), min(end, self.blocks.stop)
        if run not in self._inside:
            units = self.units[slice(*run)]
            self._inside[run] = tuple({id(unit): unit for unit in units}.values())
        return self._inside[run]

    @cached_property
    def _inside(self) -> dict[tuple[int, int], tuple[PricedUnit, ...]]:
        return {}

    @cached_property
    def first_alike(self) -> tuple[int, ...]:
        """The first unit that is priced as each is; nothing hides behind the first block."""
        first: dict[Hashable, int] = {}
        return tuple(
            first.setdefault((id(unit), index == self.blocks.start), index)
            for index, unit in enumerate(self.units)
        )

    @cached_property
    def first_alike_pair(self) -> tuple[int, ...]:
        """The first unit that is priced as each is, with the unit behind it."""
        first: dict[Hashable, int] = {}
        keys = [(id(unit), index in self.blocks) for index, unit in enumerate(self.units)]
        pairs = zip(keys, (*keys[1:], None), strict=True)
        return tuple(first.setdefault(pair, index) for index, pair in enumerate(pairs))

    @cached_property
    def stretches(self) -> tuple[int, ...]:
        """The first unit of each unit's stretch, within which runs of one length are alike.

        Its units compute the same and receive as much. A weight that several units read tells one
        from another, and its first reader, for which it counts, from the rest; and so does an
        activation that only some of them keep, unless runs of each length keep as much of all such
        wherever they lie. (Nothing hides behind the first block, which is left to those who price
        it.)
        """
        tied = [units for each in self.tied for units in (each.units, each.units[:1])]
        held = [units for s in self.shared for units in (s.units, s.owners, s.received)]
        apart, together = self._stretches([*tied, *held]), self._stretches(tied)
        ends = {start: end for end, start in enumerate(together, start=1)}
        differ = dict.fromkeys(
            joint for own, joint in zip(apart, together, strict=True) if own != joint
        )
        alike = {start for start in differ if self._keep_alike(start, ends[start])}
        return tuple(
            joint if joint in alike else own for own, joint in zip(apart, together, strict=True)
        )

    def _keep_alike(self, first: int, end: int) -> bool:
        """Whether all runs of a length between two units keep as much of shared activations."""
        units, places = len(self.units), np.arange(first, end)
        sizes = np.array([[each.size_bytes] for each in self.shared])
        reads, owns, received = (
            np.array([[unit in held(each) for unit in range(units + 1)] for each in self.shared])
            for held in (attrgetter("units"), attrgetter("owners"), attrgetter("received"))
        )
        reads_before, owns_before = (
            np.pad(np.cumsum(each, axis=1), ((0, 0), (1, 0))) for each in (reads, owns)
        )
        for length in range(1, end - first):
            starts = places[: len(places) - length + 1]
            sent = received[:, starts + length]
            has_readers, has_owners = (
                before[:, starts + length] > before[:, starts]
                for before in (reads_before, owns_before)
            )
            counted = has_readers & ~has_owners
            # In receive buffers, where there are some, a stage holds what it receives.
            held = has_readers | has_owners | received[:, starts]
            for kept in (counted, counted & ~received[:, starts], sent & held):
                if np.ptp((sizes * kept).sum(axis=0)):
                    return False
        return True

    def _stretches(self, together: Sequence[Collection[int]]) -> list[int]:
        """The first unit of each unit's stretch where sets of units tell those in them apart."""
        marks: dict[int, list[int]] = defaultdict(list)
        for at, readers in enumerate(together):
            for reader in readers:
                marks[reader].append(at)
        ends, starts, before = {0, len(self.units) - 1}, list[int](), None
        for index, unit in enumerate(self.units):
            place = tuple(
                each[index : index + 1]
                for each in (self.entering_bytes, self.entering_tensors, self.received_bytes)
            )
            key = id(unit), place, tuple(marks[index]), index in ends and index
            starts.append(starts[-1] if key == before else index)
            before = key
        return starts

    def with_blocks(self, number: int) -> "ModelUnits":
        """The same model with another number of blocks, each as the second of its three."""
        last = self.blocks.stop
        assert last == _TRACED_BLOCKS + 1, "a prologue, three blocks and an epilogue"
        places = (0, *[2] * number, *range(last, len(self.units)))
        return replace(
            self,
            units=tuple(self.units[place] for place in places),
            entering_bytes=tuple(self.entering_bytes[place] for place in places),
            entering_tensors=tuple(self.entering_tensors[place] for place in places),
            matmul_flop=tuple(self.matmul_flop[place] for place in places),
            received_bytes=tuple(self.received_bytes[place] for place in places),
            tied=tuple(
                replace(tied, units=tuple(_moved(tied.units, number))) for tied in self.tied
            ),
            shared=tuple(
                replace(
                    each,
                    units=frozenset(_moved(each.units, number)),
                    owners=frozenset(_moved(each.owners, number)),
                    received=frozenset(_moved(each.received, number)),
                    handed=frozenset(_moved(each.handed, number)),
                )
                for each in self.shared
            ),
        )


class UnitSums:
    """Prefix sums over the units, of what is the same for units that compute the same.

    The first block may differ from others of its kind: no block runs before it.
    """

    def __init__(self, model: ModelUnits) -> None:
        """Group the units."""
        blocks = model.blocks
        first: dict[tuple[int, bool, bool], int] = {}
        self._groups = [
            first.setdefault((id(unit), index in blocks, index in (0, blocks.start)), index)
            for index, unit in enumerate(model.units)
        ]
        self._firsts = tuple(first.values())

    def of(self, of_unit: Callable[[int], float]) -> list[float]:
        """Return the sums before each unit, and that of all."""
        values = {index: of_unit(index) for index in self._firsts}
        return list(accumulate((values[index] for index in self._groups), initial=0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedWork:
    """A weight that several units read."""

    units: tuple[int, ...]
    """Its readers, in order."""
    elements: int
    """Its elements on a tp rank."""
    trained: bool
    """Whether it is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """The work of one microbatch through each unit, with its layouts chosen."""

    units: tuple[UnitWork, ...]
    """As in ``ModelUnits``; units that compute the same are one object."""
    entering_bytes: tuple[int, ...]
    """As in ``ModelUnits``."""
    entering_tensors: tuple[int, ...]
    """As in ``ModelUnits``."""
    tied: tuple[TiedWork, ...]
    """Weights that several units read."""
    shared: tuple[SharedActivation, ...]
    """As in ``ModelUnits``."""
    matmul_flop: tuple[int, ...]
    """As in ``ModelUnits``."""
    received_bytes: tuple[tuple[int, ...], ...]
    """As in ``ModelUnits``."""
    sent_parts: int
    """As in ``ModelUnits``."""
    epilogue_units: int
    """As in ``ModelUnits``."""
    buffer_bytes: int
    """As in ``ModelUnits``."""
    held_by_code: tuple[tuple[int, frozenset[int]], ...]
    """As in ``ModelUnits``."""

    def priced(self, rank: RankSpec) -> ModelUnits:
        """Price every unit."""
        prices = {key: price_unit(work, rank) for key, work in _by_identity(self.units)}
        return ModelUnits(
            units=tuple(prices[id(work)] for work in self.units),
            entering_bytes=self.entering_bytes,
            entering_tensors=self.entering_tensors,
            tied=tuple(
                TiedWeight(
                    units=tied.units,
                    trained_bytes=tied.trained * tied.elements * master_bytes(rank.dtype),
                    gathered_bytes=tied.elements * DTYPE_BYTES[rank.dtype],
                )
                for tied in self.tied
            ),
            shared=self.shared,
            matmul_flop=self.matmul_flop,
            received_bytes=self.received_bytes,
            sent_parts=self.sent_parts,
            epilogue_units=self.epilogue_units,
            buffer_bytes=self.buffer_bytes,
            held_by_code=self.held_by_code,
        )


def _by_identity(works: Iterable[UnitWork]) -> Iterable[tuple[int, UnitWork]]:
    """Each object once."""
    return {id(work): work for work in works}.items()


_TRACED_BLOCKS = 3
"""Blocks of a model that stands for others: the first, one for all between, the last."""


def _moved(units: Iterable[int], number: int) -> Iterable[int]:
    """Where units of a model of three blocks lie in one of ``number`` blocks."""
    for unit in units:
        if unit == 2:
            yield from range(2, number)
        elif unit == 0:
            yield 0
        elif unit == 1:
            yield 1
        else:
            yield unit - _TRACED_BLOCKS + number
