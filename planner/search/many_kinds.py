"""The recomputation of a run whose blocks are of so many kinds that choices are not enumerated."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.cost.stage_costs import StageCosts
from planner.search.columns import Room
from planner.search.knapsack import Knapsack, Limit, Section
from planner.search.knapsack_choices import Choice, fastest
from planner.search.run_ends import ends_of
from planner.vocabulary import RECOMPUTATIONS

_MOST_STRUCTURES = 12
"""Of blocks of a run, up to which choices are enumerated."""

Sizes = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The model's blocks in order, under each recomputation that there is to choose from."""

    seconds: NDArray[np.float64]
    """``StageCosts.recompute_s``."""
    kept: Sizes
    """Activations."""
    starting: Sizes
    """Highest transients when a backward starts."""
    ending: Sizes
    """The same among the last of a backward."""


class ManyKinds:
    """The runs of one configuration whose choices are not enumerated."""

    def __init__(self, table: StageCosts, *, kinds: Sequence[str]) -> None:
        """Keep the table.

        Args:
            table: Prices of the configuration.
            kinds: Recomputations to choose from, in the order of RECOMPUTATIONS.
        """
        self._table = table
        self._kinds = kinds
        self._transients = table.memory.transients

    def has(self, first: int, end: int) -> bool:
        """Whether a run is one of these."""
        blocks = self._blocks_of(first, end)
        return len({self._table.units[i].structure for i in blocks}) > _MOST_STRUCTURES

    def fastest(
        self, first: int, end: int, room: Room, *, received: Sequence[int], tolerance_s: float
    ) -> Choice | None:
        """The fastest choice for the blocks of a run, None where none fits.

        Args:
            first: First unit.
            end: One past the last unit.
            room: What the run may hold.
            received: What its first block keeps less by recomputation, in buffers; () for nothing.
            tolerance_s: By how much another choice may be faster.
        """
        blocks = self._blocks_of(first, end)
        inside = slice(blocks.start - 1, blocks.stop - 1)
        sizes = self.blocks.kept[inside]
        kept = sizes.copy()
        if received:
            kept[0] -= [received[RECOMPUTATIONS.index(kind)] for kind in self._kinds]
        problem = Knapsack(
            seconds=self.blocks.seconds[inside],
            kept=kept,
            sizes=sizes,
            sections=[
                Section(
                    blocks=range(each.start - blocks.start, each.stop - blocks.start),
                    left=self._transients.left_of(each),
                    come=self._transients.come_of(each),
                )
                for each in self._transients.sections.of(first, end)
            ],
            limits=list(self._limits(first, end, room)),
        )
        return fastest(problem, tolerance_s=tolerance_s)

    @cached_property
    def blocks(self) -> Blocks:
        """All blocks, each under the recomputations in the order of ``kinds``."""
        table, model, kinds = self._table, self._table.model, self._kinds
        alike: dict[tuple[int, int], int] = {}
        keys = zip(model.first_alike, model.first_alike_pair, strict=True)
        places = [alike.setdefault(key, at) for at, key in enumerate(keys)]
        places = places[model.blocks.start : model.blocks.stop]
        at = [RECOMPUTATIONS.index(kind) for kind in kinds]
        of_unit = {
            index: [
                (table.recompute_s(index, kind), table.units[index].activation_bytes[kind], *own)
                for kind, own in zip(kinds, (highest[k] for k in at), strict=True)
            ]
            for index in dict.fromkeys(places)
            for highest in [self._transients.by_kind(index)]
        }
        found = np.array([of_unit[index] for index in places]).reshape(-1, len(kinds), 4)
        seconds, kept, starting, ending = found.transpose(2, 0, 1)
        return Blocks(seconds=seconds, kept=kept, starting=starting, ending=ending)

    def _blocks_of(self, first: int, end: int) -> range:
        blocks = self._table.model.blocks
        return range(max(first, blocks.start), min(end, blocks.stop))

    def _limits(self, first: int, end: int, room: Room) -> Iterator[Limit]:
        """What the blocks of a run may keep at each moment, and in any case."""
        blocks = self._blocks_of(first, end)
        inside = slice(blocks.start - 1, blocks.stop - 1)
        ends = ends_of(self._table, first, end)
        starting = self.blocks.starting[inside] + self._beside(first, end)[:, None]
        joined = [[self._transients.joined_bytes(block, first, end)] for block in blocks]
        early = np.maximum(ends.early_prologue, self.blocks.ending[inside] + joined)
        always = np.inf
        for moment, room_bytes in room.by_moment:
            number = moment.in_flight
            left = room_bytes - number * (ends.kept + room.state.beside_bytes)
            if moment.is_ending:
                left += ends.kept - ends.left
                yield Limit(each=number - 1 + 1 / len(blocks), goes=False, most=left - early)
                continue
            yield Limit(each=number, goes=True, most=left + ends.released - starting)
            beside = (number, ends.highest), (number - 1, ends.prologue - ends.released)
            for each, size in beside:
                most = (left - size) / each if each else np.where(left < size, -1.0, np.inf)
                always = min(always, float(most))
        if always < np.inf:
            yield Limit(each=1.0, goes=False, most=np.full(starting.shape, always))

    def _beside(self, first: int, end: int) -> Sizes:
        """What a run's blocks have beside their transients when their backward starts."""
        transients = self._transients
        return np.array(
            [
                transients.joined_at_start(block, first, end)
                + transients.reduced_behind(section, end)
                for section in transients.sections.of(first, end)
                for block in section
            ],
            dtype=np.float64,
        )
