"""Makes columns of the stage ILP: runs of units with the recomputation that fits.

A stage of a configuration with one stage per rank needs, for each run of units, only the
cheapest recomputation that fits. Where a rank holds several stages they compete for its memory:
each run keeps several columns there, one for each kind of recomputation of all its blocks.

Finding the mix is a multiple-choice knapsack: blocks of one structure are alike, so that only
counts per kind matter, and the Pareto sets of the structures are merged. Of too many structures it
is left to ``many_kinds``.
"""

from collections.abc import Sequence

import numpy as np

from planner.cost.held_stage import left_bytes
from planner.cost.stage_costs import StageCosts
from planner.search.columns import Column, KnownMixes, Mix, Room, RunState
from planner.search.fronts import (
    NO_BLOCKS,
    Beside,
    Front,
    Group,
    Highest,
    Kind,
    Section,
    alike,
    before,
    in_order,
    joined,
)
from planner.search.many_kinds import ManyKinds
from planner.search.run_ends import RunEnds, ends_of
from planner.strategy.moments import RankMoment
from planner.vocabulary import RECOMPUTATIONS, Recomputation

_TOLERANCE = 1e-6
"""Share of a run's time by which a recomputation of more kinds may be slower than the fastest."""


class ColumnMaker:
    """Makes the columns of one configuration."""

    def __init__(self, table: StageCosts, *, kinds: Sequence[str], known: KnownMixes) -> None:
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
        self._alike: dict[tuple[int, int], dict[Kind, list[int]]] = {}
        self.many = ManyKinds(table, kinds=self.kinds)
        """Of runs whose choices are not enumerated."""
        self._ends: dict[tuple[int, int], RunEnds] = {}
        self._divides = table.configuration.divides_backward
        self._fronts = known.fronts
        self._mixes = known.mixes
        self._states: dict[tuple[int, int], RunState] = {}
        self.num_near = 0
        """Recomputations that were found near enough."""
        self.share_off = 0.0
        """Share of its time by which a run that was made may be slower than with the fastest."""

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

    def fits(
        self, first: int, end: int, *, moments: Sequence[RankMoment], capacity_bytes: float
    ) -> bool:
        """Whether a run fits a rank of its own, however it is recomputed.

        The fastest recomputation for all blocks, or the leanest, tells of most that do.
        """
        room = self._room(first, end, moments, capacity_bytes)
        if room is None:
            return False
        uniform = (self._fixed_mix(first, end, kind) for kind in (self.kinds[0], self.kinds[-1]))
        return any(map(room.holds, uniform)) or self._mixed(first, end, room) is not None

    def cheapest(
        self, first: int, end: int, *, moments: Sequence[RankMoment], capacity_bytes: float
    ) -> Mix | None:
        """The fastest recomputation of a run that fits a rank of its own."""
        room = self._room(first, end, moments, capacity_bytes)
        if room is None:
            return None
        fastest = self._fixed_mix(first, end, self.kinds[0])
        return fastest if room.holds(fastest) else self._mixed(first, end, room)

    def _room(
        self, first: int, end: int, moments: Sequence[RankMoment], capacity_bytes: float
    ) -> Room | None:
        """Room of a run on a rank of its own, None where its state alone has none."""
        state = self._state(first, end)
        lacks_host = self.table.state.lacks(self.table.memory.host_bytes(first, end))
        if state.reduction_bytes > capacity_bytes or lacks_host:
            return None
        by_moment = [(moment, capacity_bytes - state.held_bytes(moment)) for (moment,) in moments]
        return Room(state=state, by_moment=by_moment)

    def _mixed(self, first: int, end: int, room: Room) -> Mix | None:
        """The fastest recomputation that fits, of a run whose fastest does not."""
        if len(self.kinds) == 1:
            return None
        if self.many.has(first, end):
            return self._near_fastest(first, end, room)
        beside = room.state.beside_bytes
        ends, front = self._ends_of(first, end), self._front(first, end)
        starting, ending = front.highest.T
        early = np.maximum(ends.early_prologue, ending)
        late = np.maximum(starting, ends.prologue - front.kept) - ends.released
        late = np.maximum(ends.highest, late)
        all_kept = front.kept + ends.kept
        left = front.kept // max(1, front.num_blocks) + ends.left
        fitting = np.ones(len(front.kept), dtype=bool)
        for moment, room_bytes in room.by_moment:
            held = moment.in_flight * (all_kept + beside) - moment.is_ending * (all_kept - left)
            fitting &= np.maximum(0, held) + (early if moment.is_ending else late) <= room_bytes
        if not fitting.any():
            return None
        place = int(fitting.argmax())
        kinds = self._kinds_of(first, end, front.counts_of(place))
        seconds, kept = float(front.seconds[place]), int(front.kept[place])
        return self._finished(first, end, kinds, recompute_s=seconds, kept_bytes=kept)

    def _near_fastest(self, first: int, end: int, room: Room) -> Mix | None:
        """The same of a run of blocks of many kinds, near enough (``share_off``)."""
        run_s, received = self.table.total("least", first, end), self._received(first)
        found = self.many.fastest(
            first, end, room, received=received, tolerance_s=_TOLERANCE * run_s
        )
        if found is None:
            return None
        self.num_near += 1
        self.share_off = max(self.share_off, (found.seconds - found.least_s) / run_s)
        blocks = (index for index in range(first, end) if index not in (0, self._last))
        kinds = {index: self.kinds[at] for index, at in zip(blocks, found.kinds, strict=True)}
        return self._mix(first, end, kinds)

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

    def _ends_of(self, first: int, end: int) -> RunEnds:
        """What prologue and epilogue add to a run."""
        if (first, end) not in self._ends:
            self._ends[first, end] = ends_of(self.table, first, end)
        return self._ends[first, end]

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
        return self._mix(first, end, dict.fromkeys(blocks, kind))

    def _mix(self, first: int, end: int, kinds: dict[int, str]) -> Mix:
        """The mix with a kind for each block."""
        recompute_s = sum(self.table.recompute_s(i, kind) for i, kind in kinds.items())
        kept_bytes = sum(self.table.units[i].activation_bytes[kind] for i, kind in kinds.items())
        if kinds and (received := self._received(first)):
            kept_bytes -= received[RECOMPUTATIONS.index(next(iter(kinds.values())))]
        return self._finished(first, end, kinds, recompute_s=recompute_s, kept_bytes=kept_bytes)

    def _alike_blocks(self, first: int, end: int) -> dict[Kind, list[int]]:
        """Blocks of a run by what tells them apart."""
        transients, start = self.table.memory.transients, self.table.model.blocks.start
        if (first, end) in self._alike:
            return self._alike[first, end]
        blocks: dict[tuple[str, bool, Highest], list[int]] = {}
        for index in range(first, end):
            if index not in (0, self._last):
                highest = self._highest(index)
                if self._has_tied and (last := transients.joined_bytes(index, first, end)):
                    more = transients.joined_at_start(index, first, end)
                    highest = tuple((begin + more, late + last) for begin, late in highest)
                kind = self.table.units[index].structure, index == start, highest
                blocks.setdefault(kind, []).append(index)
        received = (self._received(first), *[()] * len(blocks))
        self._alike[first, end] = {
            (*kind, less): at for (kind, at), less in zip(blocks.items(), received, strict=False)
        }
        return self._alike[first, end]

    def _highest(self, index: int) -> Highest:
        """``Transients.by_kind``, looked up once for each unit."""
        if index not in self._by_kind:
            self._by_kind[index] = self.table.memory.transients.by_kind(index)
        return self._by_kind[index]

    def _front(self, first: int, end: int) -> Front:
        """Choices of kinds for the blocks of a run that no other beats, fastest first.

        They are those of its first section and of the run without it; where blocks all differ, runs
        that end with the same one have all but the first in common.
        """
        key: tuple[tuple[Section, Beside], ...] = ()
        front = NO_BLOCKS
        for section in reversed(self.table.memory.transients.sections.of(first, end)):
            own = {k: at for k, at in self._alike_blocks(first, end).items() if at[0] in section}
            groups = tuple((kind, len(at)) for kind, at in own.items())
            beside = self._beside(section, end)
            key = ((groups, beside), *key)
            if key not in self._fronts:
                of_section = self._section_front(groups, [at[0] for at in own.values()])
                self._fronts[key] = before(of_section, front, beside)
            front = self._fronts[key]
        return front

    def _beside(self, section: range, end: int) -> Beside:
        """What is beside the choices of a section of a run."""
        transients = self.table.memory.transients
        return Beside(
            left_bytes=transients.left_of(section),
            come_bytes=transients.come_of(section),
            start_bytes=transients.reduced_behind(section, end),
            most_bytes=transients.most_before_bytes,
        )

    def _section_front(self, groups: Section, indices: Sequence[int]) -> Front:
        """The same for the blocks of a section, of each group of which one is given."""
        known = next((n for n in range(len(groups), 0, -1) if groups[:n] in self._fronts), 0)
        front = self._fronts[groups[:known]] if known else NO_BLOCKS
        for at in range(known, len(groups)):
            front = joined(front, self._group(groups[at], indices[at]))
            self._fronts[groups[: at + 1]] = front
        return front

    def _kinds_of(self, first: int, end: int, counts: Sequence[tuple[int, ...]]) -> dict[int, str]:
        """Kind of each block of a run under a choice."""
        kinds: dict[int, str] = {}
        for indices, of_group in zip(self._alike_blocks(first, end).values(), counts, strict=True):
            kinds.update(zip(indices, in_order(of_group), strict=True))
        return kinds

    def _group(self, group: Group, index: int) -> Front:
        """Choices for alike blocks, one of which is given."""
        unit, ((_, _, highest, received), number) = self.table.units[index], group
        return alike(
            number,
            seconds=tuple(self.table.recompute_s(index, kind) for kind in RECOMPUTATIONS),
            kept=tuple(unit.activation_bytes[kind] for kind in RECOMPUTATIONS),
            highest=highest,
            allowed=tuple(kind in self.kinds for kind in RECOMPUTATIONS),
            received=received,
        )

    def _received(self, first: int) -> tuple[int, ...]:
        """What a run's first block keeps less by recomputation, in buffers; () where nothing."""
        return self.table.memory.buffers.more_bytes(first) if first < self._last else ()

    def _finished(
        self, first: int, end: int, kinds: dict[int, str], *, recompute_s: float, kept_bytes: int
    ) -> Mix:
        """Add prologue and epilogue, which are not recomputed, and the transients."""
        ends = self._ends_of(first, end)
        listed = tuple(kinds.get(index, Recomputation.NONE) for index in range(first, end))
        return Mix(
            kinds=listed,
            recompute_s=recompute_s,
            kept_bytes=kept_bytes + ends.kept,
            left_bytes=left_bytes(ends.left, kept_bytes, len(kinds)),
            temporary_bytes=self.table.memory.transients.start_bytes(first, end, listed),
            early_temporary_bytes=self.table.memory.transients.end_bytes(first, end, listed),
        )
