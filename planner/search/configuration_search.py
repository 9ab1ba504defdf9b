"""One configuration: what its stages can be, and a bound on its step."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import accumulate

import numpy as np

from planner.cost.kinds import CostsOfKinds
from planner.cost.stage_costs import StageCosts
from planner.cost.stage_links import Links
from planner.pricing.model_pricing import LaidOut, PricedModel
from planner.search.bounds import least_s
from planner.search.column_maker import ColumnMaker
from planner.search.columns import Column, Partition, step_time_s
from planner.search.even_cut import nearest_cut
from planner.strategy.configuration import Configuration
from planner.strategy.moments import RankMoment

_ROUNDING = 1e-12
"""Of the memory of tensors, which would else just not hold what fills a device to the byte."""

REACH_UNITS = 1
"""Units by which the length of a stage on a shared rank may differ from its even share."""


class ConfigurationSearch:
    """Runs of units, columns and bounds of one configuration under one choice of layouts."""

    def __init__(
        self,
        configuration: Configuration,
        priced: PricedModel,
        table: StageCosts,
        maker: ColumnMaker,
    ) -> None:
        """Keep the configuration with its prices."""
        self.configuration = configuration
        self.stands_for: tuple[Configuration, ...] = (configuration,)
        """Configurations of which all that is found here holds."""
        self.priced = priced
        self.table = table
        self.maker = maker
        beside_reserve = table.device.capacity_bytes - table.memory.reserve_bytes
        self.room_bytes = beside_reserve / (1 + table.memory.allocator_share) * (1 + _ROUNDING)
        """Of tensors on a rank."""
        self.num_units = len(table.units)
        self.positions = [0, *(c.after_unit + 1 for c in priced.graph.cuts), self.num_units]
        """Where a stage may begin or end."""
        self._columns: dict[tuple[int, int, int], Column | None] = {}
        self._fits: dict[tuple[int, int, int], bool] = {}
        self._kinds: dict[int, int] = {}
        self._first_of_kind: dict[tuple[tuple[RankMoment, ...], Links], int] = {}
        self._leanest: dict[tuple[Links, int, int], Column] = {}
        self._shared_columns: dict[tuple[Links, int, int], list[Column]] = {}
        whole = table.seconds_with(0, self.num_units, 0.0)
        passing_s = whole.compute_s + whole.tp_comm_s + whole.dp_comm_s
        forward_s, _, weight_s = self.least_parts_s(0, self.num_units)
        self.parts_s = forward_s, passing_s - forward_s - weight_s, weight_s
        """One microbatch through all stages, nothing recomputed or sent between stages."""
        ends_s = table.framework.step_s / configuration.virtual_stages
        self.once_s = (whole.step_s - ends_s) / configuration.degrees.pp + table.framework.step_s
        """Once per step on the rank that has most to do, at the least."""
        self.even_s = self.least_s(0, self.num_units) / configuration.num_stages
        """Even share of a stage."""
        self.transfers_s = table.least_transfers_s(self.positions[1:-1])
        """Transfers of one microbatch by stage, at the least."""
        self.bound_s = self.once_s + least_s(
            configuration, parts_s=self.parts_s, transfers_s=self.transfers_s
        )
        """No choice of stages is faster. Sharpened as the search goes on."""
        self._moments: dict[int, tuple[RankMoment, ...]] = {}
        self._counted: dict[int, Sequence[tuple[bool, bool, int, int]]] = {}
        self._held: dict[tuple[int, int], tuple[float, float, int, int, int]] = {}
        self._last_held: dict[tuple[int, int], int] = {}

    @cached_property
    def _least_kept(self) -> list[int]:
        """Activations that the units before each keep of a microbatch at the least."""
        sizes = (
            min(unit.activation_bytes[kind] for kind in self.maker.kinds)
            if 0 < index < self.num_units - 1
            else 0
            for index, unit in enumerate(self.table.units)
        )
        return list(accumulate(sizes, initial=0))

    def at(self, stage: int) -> "ConfigurationSearch":
        """The same on the kind of device that a stage runs on: all are of one kind."""
        return self

    @property
    def num_near(self) -> int:
        """Recomputations of blocks of many kinds that were looked for."""
        return self.maker.num_near

    @property
    def share_off(self) -> float:
        """Share of a stage's time by which one of them may be slower than the fastest."""
        return self.maker.share_off

    @property
    def costs(self) -> StageCosts | CostsOfKinds:
        """Prices of its stages."""
        return self.table

    def laid_out(self, columns: Sequence[Column]) -> list[LaidOut]:
        """Layouts of the units of a choice of columns."""
        return [LaidOut(priced=self.priced, units=range(self.num_units))]

    @property
    def shares_ranks(self) -> bool:
        """Whether a rank holds several stages."""
        return self.configuration.virtual_stages > 1

    def least_s(self, first: int, end: int) -> float:
        """One microbatch through a run, nothing recomputed, nothing sent between stages."""
        return self.table.total("least", first, end)

    @cached_property
    def unit_s(self) -> float:
        """The longest unit."""
        return float(np.diff(self.table.before("least")).max())

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all runs of one length are alike, but for those at the ends of the model."""
        last = self.num_units - 1
        entering = self.priced.model.entering_bytes
        return (
            len(self.positions) == self.num_units + 1
            and last > 1
            and self.stretches[last - 1] == 1
            and entering[last] == entering[1]
        )

    @cached_property
    def stretches(self) -> Sequence[int]:
        """``ModelUnits.stretches``, the first block apart where it costs something else."""
        found = self.priced.model.stretches
        if found[1:3] != (1, 1) or self.table.are_alike(1, 2, self.maker.kinds):
            return found
        return [2 if start == 1 and unit > 1 else start for unit, start in enumerate(found)]

    @cached_property
    def stretch_ends(self) -> dict[int, int]:
        """Where the last run ends that is inside each stretch, by the unit it begins with."""
        entering, found = self.priced.model.entering_bytes, dict[int, int]()
        for start in dict.fromkeys(self.stretches):
            end = bisect_right(self.stretches, start)
            alike = end < self.num_units and entering[end] == entering[start]
            found[start] = end if alike or end - start == 1 else end - 1
        return found

    def representative(self, first: int, end: int) -> tuple[int, int]:
        """The run that stands for all alike ones."""
        start = self.stretches[first]
        if start < first and end <= self.stretch_ends[start]:
            return start, start + end - first
        return first, end

    def fullest_moments(self, rank: int) -> tuple[RankMoment, ...]:
        """``Configuration.fullest_moments``, looked up once for each rank."""
        if rank not in self._moments:
            self._moments[rank] = self.configuration.fullest_moments(rank)
        return self._moments[rank]

    def column(self, stage: int, first: int, end: int) -> Column | None:
        """The fastest column of a stage that has its rank for itself, None where none fits."""
        key = (self.kind_of_stage(stage), first, end)
        if key not in self._columns:
            self._columns[key] = self._new_column(stage, first, end)
        return self._columns[key]

    def _new_column(self, stage: int, first: int, end: int) -> Column | None:
        """It is that of the run that stands for all alike ones."""
        start, stop = self.representative(first, end)
        if start != first:
            found = self.column(stage, start, stop)
            return None if found is None else found.placed(first)
        moments, room_bytes = self.fullest_moments(stage), self.room_bytes
        mix = self.maker.cheapest(first, end, moments=moments, capacity_bytes=room_bytes)
        return None if mix is None else self.maker.column(stage, first, end, mix)

    def fits_alone(self, stage: int, first: int, end: int) -> bool:
        """Whether a stage that has its rank for itself can be this run."""
        key = (self.kind_of_stage(stage), *self.representative(first, end))
        if key not in self._fits:
            moments, room_bytes = self.fullest_moments(stage), self.room_bytes
            self._fits[key] = self.maker.fits(*key[1:], moments=moments, capacity_bytes=room_bytes)
        return self._fits[key]

    def kind_of_stage(self, stage: int) -> int:
        """The first stage that holds as much as this one at each moment, with links like its."""
        if stage not in self._kinds:
            like = (self.fullest_moments(stage), self.table.links(stage))
            self._kinds[stage] = self._first_of_kind.setdefault(like, stage)
        return self._kinds[stage]

    def columns(self, stage: int, first: int, end: int) -> list[Column]:
        """All columns of a run: the fastest that fits, or those that a shared rank chooses from."""
        if not self.shares_ranks:
            column = self.column(stage, first, end)
            return [] if column is None else [column]
        if not self.is_near_even(first, end):
            return []
        start, stop = self.representative(first, end)
        place = (self.table.links(stage), start, stop)
        if place not in self._shared_columns:
            self._shared_columns[place] = [
                self.maker.column(stage, start, stop, mix)
                for mix in self.maker.uniform_mixes(start, stop)
            ]
        found = self._shared_columns[place]
        return found if start == first else [column.placed(first) for column in found]

    def leanest(self, stage: int, first: int, end: int) -> Column:
        """The column of a run that keeps the least, one recomputation for all blocks.

        It may stand for an alike run elsewhere.
        """
        start, stop = self.representative(first, end)
        place = (self.table.links(stage), start, stop)
        if place not in self._leanest:
            mix = self.maker.leanest(start, stop)
            self._leanest[place] = self.maker.column(stage, start, stop, mix)
        return self._leanest[place]

    def is_near_even(self, first: int, end: int) -> bool:
        """Whether a stage of a shared rank may be this long."""
        return abs(self.least_s(first, end) - self.even_s) <= REACH_UNITS * self.unit_s

    @cached_property
    def near_inner_runs(self) -> list[tuple[int, int]]:
        """Runs from unit 1 on that ``is_near_even`` takes, the epilogue left out."""
        return [(1, end) for end in self.positions[2:-1] if self.is_near_even(1, end)]

    def exceeds_memory(
        self, stage: int, first: int, end: int, *, received: int | None = None
    ) -> bool:
        """Whether no run that begins at ``first`` and ends at ``end`` or later fits a rank.

        Parameters and activations grow with the run, and so does what lies in host memory. Receive
        buffers do not (they end with the model), and are left out.

        Args:
            stage: The stage.
            first: First unit.
            end: One past the last unit.
            received: What of its activations lies in such buffers, None for what does of this run.
        """
        if self.table.state.lacks(self.table.memory.host_bytes(first, end)):
            return True
        held, gradients, late, kept, own = self.least_held(*self.representative(first, end))
        room, received = self.room_bytes - held, own if received is None else received
        return any(
            has_gradients * gradients + follows * late + whole * kept - buffers * received > room
            for has_gradients, follows, whole, buffers in self._counts(stage)
        )

    def last_held(self, stage: int, first: int) -> int:
        """The last end of a run from ``first`` on that does not exceed a rank's memory."""
        key = stage if self.shares_ranks else self.kind_of_stage(stage), first
        if key not in self._last_held:
            exceeds = partial(self.exceeds_memory, stage, first)
            self._last_held[key] = self._last_below(exceeds, first)
        return self._last_held[key]

    def furthest_end(self, stage: int, first: int, *, near: int) -> int:
        """Where no run can end later that begins at ``first`` or earlier, wherever it begins.

        Args:
            stage: The stage.
            first: The unit.
            near: Where that may be: the nearer, the fewer runs are looked at.
        """
        exceeds = partial(self.exceeds_memory, stage, first, received=self._most_received)
        return self._last_below(exceeds, first, near=near)

    def _last_below(self, exceeds: Callable[[int], bool], first: int, *, near: int = 0) -> int:
        """The last end behind ``first`` that does not exceed something, ``first`` if each does."""
        positions = self.positions
        low, high = bisect_right(positions, first), len(positions)
        place, step = min(bisect_left(positions, near), high - 1), 1
        while low <= place < high:  # in growing steps, to the first that lies on the other side
            if exceeds(positions[place]):
                high, place = place, place - step
            else:
                low, place = place + 1, place + step
            step *= 2
        return positions[bisect_left(positions, 1, lo=low, hi=high, key=exceeds) - 1]

    @cached_property
    def _most_received(self) -> int:
        """What lies in receive buffers of the activations that any run counts, at the most."""
        return max(map(self.table.memory.buffers.most_bytes, self.positions[:-1]))

    def _counts(self, stage: int) -> Sequence[tuple[bool, bool, int, int]]:
        """Of fullest moments: has gradients, follows a backward, whole microbatches, buffers."""
        if stage not in self._counted:
            place = stage // self.configuration.degrees.pp
            moments = [m[place] for m in self.fullest_moments(self.configuration.rank_of(stage))]
            held = ((moment, moment.in_flight + moment.waiting) for moment in moments)
            counts = ((m.has_gradients, m.follows_backward, n - m.is_ending, n) for m, n in held)
            self._counted[stage] = tuple(dict.fromkeys(counts))
        return self._counted[stage]

    def least_held(self, first: int, end: int) -> tuple[float, float, int, int, int]:
        """Of a run always, with gradients, after a backward, for each microbatch, in buffers."""
        run = (first, end)
        if run not in self._held:
            memory = self.table.memory
            self._held[run] = (
                memory.static_bytes(first, end) - memory.buffers.size_bytes(first, end),
                memory.gradient_bytes(first, end),
                memory.gathered.late_bytes(first, end),
                self._least_kept[end] - self._least_kept[first],
                memory.buffers.most_bytes(first),
            )
        return self._held[run]

    def fits(self, rank: int, held: Sequence[Column]) -> bool:
        """Whether a rank can hold some stages: the two moments of ``StageMemory.peak``."""
        if sum(column.state.reduction_bytes for column in held) > self.room_bytes:
            return False
        return all(
            sum(c.held_bytes(at) for c, at in zip(held, moment, strict=True)) <= self.room_bytes
            for moment in self.fullest_moments(rank)
        )

    def all_fit(self, columns: Sequence[Column]) -> bool:
        """Whether every rank that holds several stages can hold these."""
        ranks = range(self.configuration.degrees.pp if self.shares_ranks else 0)
        stages = (self.configuration.stages_of(rank) for rank in ranks)
        return all(
            self.fits(rank, [columns[stage] for stage in mine]) for rank, mine in enumerate(stages)
        )

    def last_end(self, stage: int) -> int:
        """Where a stage must end at the latest, so that each later one has a unit."""
        later = self.configuration.num_stages - 1 - stage
        return self.positions[len(self.positions) - 1 - later]

    def rest_s(self, columns: Sequence[Column]) -> tuple[float, float, float]:
        """``least_parts_s`` of the units that no column holds."""
        rest_s = list(self.least_parts_s(0, self.num_units))
        for column in columns:
            for part, own_s in enumerate(self.least_parts_s(column.first, column.end)):
                rest_s[part] -= own_s
        forward_s, input_s, weight_s = (max(0.0, each) for each in rest_s)
        return forward_s, input_s, weight_s

    def least_parts_s(self, first: int, end: int) -> tuple[float, float, float]:
        """``least_s`` by the parts that ``Path.counts`` has."""
        forward_s = self.least_forward_s(first, end)
        weight_s = 0.0
        if self.configuration.divides_backward:
            weight_s = self.table.total("least_weight", first, end)
        return forward_s, self.least_s(first, end) - forward_s - weight_s, weight_s

    def least_forward_s(self, first: int, end: int) -> float:
        """The forward part of ``least_s``."""
        return self.table.total("least_forward", first, end)

    def slowest_s(self, limit_s: float) -> float:
        """Longest time per microbatch of a stage in a step no slower than the limit."""
        return (limit_s - self.once_s) / self.configuration.rank_passes * (1 + 1e-9)

    def ends(self, stage: int, first: int, slowest_s: float) -> Iterator[int]:
        """Where a stage that begins at ``first`` may end, by time, memory and room for others."""
        later = self.configuration.num_stages - 1 - stage
        limit = min(self.last_end(stage), self.last_held(stage, first))
        for end in self.positions[bisect_right(self.positions, first) :]:
            if end > limit or self.least_s(first, end) > slowest_s:
                break
            if later or end == self.num_units:
                yield end

    def even_cut(self) -> list[int]:
        """Boundaries of the stages nearest to even shares of the time."""
        stages = range(1, self.configuration.num_stages)
        places = nearest_cut(self._least_before_s, [stage * self.even_s for stage in stages])
        return [self.positions[place] for place in places]

    @cached_property
    def _least_before_s(self) -> list[float]:
        """``least_s`` of the units before each position."""
        return [self.least_s(0, position) for position in self.positions]

    def partition(self, columns: list[Column]) -> Partition:
        """A choice of columns with its step time."""
        return Partition(
            columns=tuple(columns), objective_s=step_time_s(self.configuration, columns)
        )
