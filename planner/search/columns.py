"""Columns of the stage ILP: runs of units with the recomputation that fits.

A stage of a configuration with one stage per rank needs, for each run of units, only the
cheapest recomputation that fits. Where a rank holds several stages they compete for its memory:
each run keeps several columns there, one for each kind of recomputation of all its blocks.

Finding the mix is a multiple-choice knapsack: blocks of one structure are alike, so that only
counts per kind matter, and the Pareto sets of the structures are merged.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner.cost.held_stage import NOTHING_WAITS, WaitingBytes, left_bytes, moment_bytes
from planner.cost.pipeline import pipeline_s
from planner.cost.stage_costs import StageCosts
from planner.search.fronts import (
    NO_BLOCKS,
    Front,
    FrontCache,
    Group,
    Highest,
    Kind,
    alike,
    in_order,
    joined,
)
from planner.strategy.configuration import Configuration
from planner.strategy.moments import RankMoment, StageMoment
from planner.vocabulary import RECOMPUTATIONS, Recomputation


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Recomputation of a run of units."""

    kinds: tuple[str, ...]
    """"none", "selective" or "full" for each unit."""
    recompute_s: float
    """Time per microbatch."""
    kept_bytes: int
    """Activations kept per microbatch."""
    left_bytes: int
    """What of it is left at the end of a backward."""
    temporary_bytes: float
    """Highest transient."""
    early_temporary_bytes: float
    """That of the units before the epilogue."""

    def transient_bytes(self, moment: StageMoment) -> float:
        """Highest transient at a moment of the schedule."""
        is_early = moment.is_ending or moment.is_dividing
        return self.early_temporary_bytes if is_early else self.temporary_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """What a run of units holds whatever it recomputes."""

    static_bytes: float
    """Parameters, optimiser states and buffers in every backward."""
    gradient_bytes: float
    """What its first backward adds to that."""
    late_gathered_bytes: int
    """What it has gathered after a backward and not before."""
    reduction_bytes: float
    """All that it holds when gradients are reduced after backward."""
    beside_bytes: int
    """``StageMemory.beside_bytes``."""
    waiting: WaitingBytes = NOTHING_WAITS
    """``StageMemory.waiting_bytes``."""
    new_gradient_bytes: int = 0
    """``StageMemory.new_gradient_bytes``."""

    def held_bytes(self, moment: StageMoment) -> float:
        """What it holds at a moment but for activations and transients."""
        held = self.static_bytes + self.gradient_bytes * moment.has_gradients
        held += self.new_gradient_bytes * moment.has_new_gradients
        return held + self.late_gathered_bytes * moment.follows_backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One way to fill one stage."""

    first: int
    """First unit."""
    end: int
    """One past the last unit."""
    mix: Mix
    """Recomputation."""
    forward_s: float
    """Forward of one microbatch, collectives and half of the transfers included."""
    backward_s: float
    """Backward of one microbatch, with recomputation and the other half."""
    step_s: float
    """Exposed traffic and optimiser, once per step."""
    state: RunState
    """What its run holds whatever it recomputes."""
    weight_s: float = 0.0
    """The part of ``backward_s`` that only the parameters' gradients need, where backwards are
    divided."""

    @property
    def parts_s(self) -> tuple[float, float, float]:
        """Forward, and the two parts of the backward, as ``Path.counts`` has them."""
        return self.forward_s, self.backward_s - self.weight_s, self.weight_s

    @property
    def microbatch_s(self) -> float:
        """One microbatch, forward and backward."""
        return self.forward_s + self.backward_s

    def held_bytes(self, moment: StageMoment) -> float:
        """All that it holds at a moment of the schedule, but for transients."""
        return self.state.held_bytes(moment) + moment_bytes(
            moment,
            kept=self.mix.kept_bytes,
            left=self.mix.left_bytes,
            beside=self.state.beside_bytes,
            waiting=self.state.waiting,
        )

    def placed(self, first: int) -> "Column":
        """The same column where an alike run starts at another unit."""
        return replace(self, first=first, end=first + self.end - self.first)


Holding = tuple[Column, ...]
"""Columns of stages that are chosen together."""


def step_time_s(configuration: Configuration, columns: Sequence[Column]) -> float:
    """Step time of a choice of columns: the action list, then the dearest rank's end."""
    pp = configuration.degrees.pp
    once_s = max(
        sum(columns[stage].step_s for stage in configuration.stages_of(rank)) for rank in range(pp)
    )
    return once_s + pipeline_s(
        configuration.schedule,
        pp=pp,
        num_microbatches=configuration.num_microbatches,
        forward_s=[column.forward_s for column in columns],
        backward_s=[column.backward_s for column in columns],
        weight_backward_s=[column.weight_s for column in columns],
    )


def placed(columns: Sequence[Column]) -> tuple[Column, ...]:
    """Move columns that stand for all runs of their length to where they follow one another."""
    placed: list[Column] = []
    first = 0
    for column in columns:
        placed.append(column.placed(first))
        first = placed[-1].end
    return tuple(placed)


class ColumnMaker:
    """Makes the columns of one configuration."""

    def __init__(self, table: StageCosts, *, kinds: Sequence[str], known: "KnownMixes") -> None:
        """Keep the table.

        Args:
            table: Prices of the configuration.
            kinds: Recomputations to choose from, in the order of RECOMPUTATIONS.
            known: What was found before for the same priced units; more is added.
        """
        self.table = table
        self.kinds = tuple(kinds)
        """Recomputations to choose from."""
        self._last = len(table.units) - 1
        self._has_tied = bool(table.model.tied)
        self._by_kind: dict[int, Highest] = {}
        self._divides = table.configuration.divides_backward
        self._fronts = known.fronts
        self._groups = known.groups
        self._mixes = known.mixes
        self._states: dict[tuple[int, int], RunState] = {}

    def uniform_mixes(self, first: int, end: int) -> list[Mix]:
        """One kind for all blocks of a run: what a stage that shares its rank chooses from."""
        fixed = [self._fixed_mix(first, end, kind) for kind in self.kinds]
        fixed.sort(key=lambda mix: (mix.recompute_s, mix.kept_bytes))
        kept: list[Mix] = []
        for mix in fixed:
            if all(
                mix.kept_bytes < other.kept_bytes
                or mix.temporary_bytes < other.temporary_bytes
                or mix.early_temporary_bytes < other.early_temporary_bytes
                for other in kept
            ):
                kept.append(mix)
        return kept

    def leanest(self, first: int, end: int) -> Mix:
        """The recomputation of a run that keeps the least, one kind for all blocks."""
        uniform = [self._fixed_mix(first, end, kind) for kind in self.kinds]
        return min(uniform, key=lambda mix: (mix.kept_bytes + mix.temporary_bytes, mix.recompute_s))

    def cheapest(
        self, first: int, end: int, *, moments: Sequence[RankMoment], capacity_bytes: float
    ) -> Mix | None:
        """The fastest recomputation of a run that fits a rank of its own."""
        memory, state = self.table.memory, self._state(first, end)
        lacks_host = self.table.state.lacks(memory.host_bytes(first, end))
        if state.reduction_bytes > capacity_bytes or lacks_host:
            return None
        rooms = [(moment, capacity_bytes - state.held_bytes(moment)) for (moment,) in moments]
        beside = state.beside_bytes

        def fits(kept: int, left: int, temporary: tuple[float, float]) -> bool:
            return all(
                moment_bytes(moment, kept=kept, left=left, beside=beside, waiting=state.waiting)
                + temporary[moment.is_ending]
                <= room
                for moment, room in rooms
            )

        fastest = self._fixed_mix(first, end, self.kinds[0])
        temporary = fastest.temporary_bytes, fastest.early_temporary_bytes
        if fits(fastest.kept_bytes, fastest.left_bytes, temporary):
            return fastest
        if len(self.kinds) == 1:
            return None
        kept, highest, released, prologue = self._ends(first, end)
        early_prologue = 0
        if first == 0:
            early_prologue = memory.transients.end_bytes(0, 1, (Recomputation.NONE,))
        front = self._front(first, end)
        starting, ending = front.highest.T
        early = np.maximum(early_prologue, ending)
        late = np.maximum(highest, np.maximum(starting, prologue - front.kept) - released)
        all_kept = front.kept + kept
        left = front.kept // max(1, front.num_blocks) + self._prologue_bytes(first)
        fitting = np.ones(len(front.kept), dtype=bool)
        for moment, room in rooms:
            held = moment.in_flight * (all_kept + beside) - moment.is_ending * (all_kept - left)
            fitting &= np.maximum(0, held) + (early if moment.is_ending else late) <= room
        if not fitting.any():
            return None
        place = int(fitting.argmax())
        kinds = self._kinds_of(first, end, front.counts_of(place))
        seconds, kept = float(front.seconds[place]), int(front.kept[place])
        return self._finished(first, end, kinds, recompute_s=seconds, kept_bytes=kept)

    def _state(self, first: int, end: int) -> RunState:
        """What a run holds whatever it recomputes."""
        if (first, end) not in self._states:
            memory = self.table.memory
            self._states[first, end] = RunState(
                static_bytes=memory.static_bytes(first, end),
                gradient_bytes=memory.gradient_bytes(first, end),
                late_gathered_bytes=memory.gathered.late_bytes(first, end),
                reduction_bytes=memory.reduction_bytes(first, end),
                beside_bytes=memory.beside_bytes(first, end),
                waiting=memory.waiting_bytes(first, end),
                new_gradient_bytes=memory.new_gradient_bytes(first, end),
            )
        return self._states[first, end]

    def _ends(self, first: int, end: int) -> tuple[int, int, int, int]:
        """What prologue and epilogue add to a run of blocks, if it has them.

        Returns:
            Activations kept, highest transient of the epilogue, what it has released when the
            blocks run their backward, and the highest transient of the prologue.
        """
        units, none = self.table.units, (Recomputation.NONE,)
        held = [units[i] for i in (0, self._last) if first <= i < end]
        kept = sum(unit.activation_bytes[Recomputation.NONE] for unit in held)
        transients = self.table.memory.transients
        highest = released = prologue = 0
        if end == self._last + 1:
            highest = transients.start_bytes(self._last, end, none)
            released = transients.released_bytes(self._last)
        if first == 0 < self._last:
            prologue = transients.start_bytes(0, 1, none) + transients.joined_bytes(0, 0, end)
        return kept, highest, released, prologue

    def _prologue_bytes(self, first: int) -> int:
        """Activations that the prologue keeps, if a run that begins with a unit has it."""
        return 0 if first else self.table.units[0].activation_bytes[Recomputation.NONE]

    def column(self, stage: int, first: int, end: int, mix: Mix) -> Column:
        """Price a run with its recomputation chosen, as some stage."""
        seconds = self.table.seconds_with(first, end, mix.recompute_s, stage=stage)
        return Column(
            first=first,
            end=end,
            mix=mix,
            forward_s=seconds.forward_s,
            backward_s=seconds.backward_s,
            weight_s=self._divides * seconds.weight_backward_s,
            step_s=seconds.step_comm_s + seconds.optimizer_s,
            state=self._state(first, end),
        )

    def _fixed_mix(self, first: int, end: int, kind: str) -> Mix:
        """The mix with one kind for all blocks."""
        key = (first, end, kind)
        if key not in self._mixes:
            self._mixes[key] = self._made_mix(first, end, kind)
        return self._mixes[key]

    def _made_mix(self, first: int, end: int, kind: str) -> Mix:
        blocks = [i for i in range(first, end) if i not in (0, self._last)]
        recompute_s = sum(self.table.recompute_s(i, kind) for i in blocks)
        kept_bytes = sum(self.table.units[i].activation_bytes[kind] for i in blocks)
        kinds = dict.fromkeys(blocks, kind)
        return self._finished(first, end, kinds, recompute_s=recompute_s, kept_bytes=kept_bytes)

    def _alike_blocks(self, first: int, end: int) -> dict[Kind, list[int]]:
        """Blocks of a run by what tells them apart."""
        transients, start = self.table.memory.transients, self.table.model.blocks.start
        blocks: dict[Kind, list[int]] = {}
        for index in range(first, end):
            if index not in (0, self._last):
                highest = self._highest(index)
                if self._has_tied and (more := transients.joined_bytes(index, first, end)):
                    highest = tuple((begin + more, late) for begin, late in highest)
                kind = self.table.units[index].structure, index == start, highest
                blocks.setdefault(kind, []).append(index)
        return blocks

    def _highest(self, index: int) -> Highest:
        """``Transients.by_kind``, looked up once for each unit."""
        if index not in self._by_kind:
            self._by_kind[index] = self.table.memory.transients.by_kind(index)
        return self._by_kind[index]

    def _front(self, first: int, end: int) -> Front:
        """Choices of kinds for the blocks of a run that no other beats, fastest first.

        They are those of the run without its last group and of this group; where blocks all
        differ, runs that begin with the same one have all but the last in common.
        """
        blocks = self._alike_blocks(first, end)
        key = tuple((kind, len(at)) for kind, at in blocks.items())
        known = next((n for n in range(len(key), 0, -1) if key[:n] in self._fronts), 0)
        front = self._fronts[key[:known]] if known else NO_BLOCKS
        for at in range(known, len(key)):
            front = joined(front, self._group(key[at], list(blocks.values())[at][0]))
            self._fronts[key[: at + 1]] = front
        return front

    def _kinds_of(self, first: int, end: int, counts: Sequence[tuple[int, ...]]) -> dict[int, str]:
        """Kind of each block of a run under a choice."""
        kinds: dict[int, str] = {}
        for indices, of_group in zip(self._alike_blocks(first, end).values(), counts, strict=True):
            kinds.update(zip(indices, in_order(of_group), strict=True))
        return kinds

    def _group(self, group: Group, index: int) -> Front:
        """Choices for alike blocks, one of which is given."""
        if group not in self._groups:
            self._groups[group] = self._alike(index, group)
        return self._groups[group]

    def _alike(self, index: int, group: Group) -> Front:
        """Time and memory of alike blocks, for the counts of each kind worth it."""
        unit, ((_, _, highest), number) = self.table.units[index], group
        return alike(
            number,
            seconds=[self.table.recompute_s(index, kind) for kind in RECOMPUTATIONS],
            kept=[unit.activation_bytes[kind] for kind in RECOMPUTATIONS],
            highest=highest,
            allowed=[kind in self.kinds for kind in RECOMPUTATIONS],
        )

    def _finished(
        self, first: int, end: int, kinds: dict[int, str], *, recompute_s: float, kept_bytes: int
    ) -> Mix:
        """Add prologue and epilogue, which are not recomputed, and the transients."""
        ends = {0, self._last} & set(range(first, end))
        listed = tuple(kinds.get(index, Recomputation.NONE) for index in range(first, end))
        kept = sum(self.table.units[index].activation_bytes[Recomputation.NONE] for index in ends)
        return Mix(
            kinds=listed,
            recompute_s=recompute_s,
            kept_bytes=kept_bytes + kept,
            left_bytes=left_bytes(self._prologue_bytes(first), kept_bytes, len(kinds)),
            temporary_bytes=self.table.memory.transients.start_bytes(first, end, listed),
            early_temporary_bytes=self.table.memory.transients.end_bytes(first, end, listed),
        )


@dataclass(frozen=True, slots=True)
class KnownMixes:
    """Recomputations of runs, for priced units and what else ``recomputation_key`` names."""

    fronts: FrontCache = field(default_factory=dict)
    """Undominated choices."""
    groups: dict[Group, Front] = field(default_factory=dict)
    """Those of alike blocks."""
    mixes: dict[tuple[int, int, str], Mix] = field(default_factory=dict)
    """One kind for all blocks of a run."""
