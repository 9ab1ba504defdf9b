"""One configuration: bounds, a good partition, and the columns that can be optimal."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.cost.breakdown import MemoryBreakdown
from planner.cost.stage_memory import HeldStage
from planner.cost.stage_table import StageTable
from planner.search.columns import Column, ColumnMaker
from planner.search.model_pricing import PricedModel
from planner.search.stage_ilp import StageProblem, objective_s, pace_factor
from planner.strategy.configuration import Configuration
from planner.strategy.schedules import in_flight

_BISECTION_STEPS = 24
"""Halvings of the interval that holds the best bottleneck: 2**-24 relative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A complete choice of stages for one configuration."""

    columns: tuple[Column, ...]
    """One per stage."""
    objective_s: float
    """Step time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastMemory:
    """What the fullest rank of a configuration needs at the least."""

    memory: MemoryBreakdown
    """By component."""
    rank: int
    """Pipeline rank."""
    kinds: tuple[str, ...]
    """Recomputation of its units."""

    @property
    def kinds_words(self) -> str:
        """The recomputation in words."""
        kinds = {kind for kind in self.kinds if kind != "none"}
        return f"{'/'.join(sorted(kinds))} recomputation" if kinds else "no recomputation"


class ConfigurationSearch:
    """Bounds and columns of one configuration under one choice of layouts.

    A run of units that is part of a feasible run is feasible and no slower, so that filling
    stages as far as they go decides whether a bottleneck can be met.
    """

    def __init__(
        self,
        configuration: Configuration,
        priced: PricedModel,
        table: StageTable,
        maker: ColumnMaker,
    ) -> None:
        """Keep the configuration with its prices."""
        self.configuration = configuration
        self.priced = priced
        self.table = table
        self._maker = maker
        device = table.device
        self.room_bytes = float(device.memory_bytes - device.reserve_bytes)
        self.positions = [0, *(c.after_unit + 1 for c in priced.graph.cuts), len(table.units)]
        self._columns: dict[tuple[int, int, int], Column | None] = {}
        self._shared_columns: dict[tuple[int, int], list[Column]] = {}
        end = len(table.units)
        whole = table.seconds_with(0, end, 0.0)
        pp = configuration.degrees.pp
        self._passing_s = whole.compute_s + whole.tp_comm_s + whole.dp_comm_s
        self._once_s = (whole.optimizer_s + whole.step_comm_s) / pp
        self._even_s = self._passing_s / configuration.num_stages
        self._unit_s = max(self._least_s(unit, unit + 1) for unit in range(end))
        self.bound_s = self._bound_s(self._passing_s / configuration.degrees.pp)
        """Lower bound: perfect balance, no recomputation, nothing exposed."""

    @property
    def counts_suffice(self) -> bool:
        """Whether all blocks are alike and every cut between units is legal.

        Then the length of a stage says all about it, except at the ends of the model.
        """
        blocks = {unit.structure for unit in self.table.units[1:-1]}
        sent = {cut.crossing_bytes for cut in self.priced.graph.cuts}
        every_cut = len(self.positions) == len(self.table.units) + 1
        return len(blocks) == 1 and len(sent) == 1 and every_cut

    def _bound_s(self, pace_s: float) -> float:
        configuration = self.configuration
        return (
            self._passing_s / configuration.virtual_stages
            + pace_factor(configuration) * pace_s
            + self._once_s
        )

    def _in_flight(self, stage: int) -> int:
        """Microbatches that a stage on a rank of its own holds at the peak."""
        configuration = self.configuration
        ((number,),) = in_flight(
            configuration.schedule,
            pp=configuration.degrees.pp,
            virtual_stages=1,
            num_microbatches=configuration.num_microbatches,
            rank=stage,
        )
        return number

    def _column(self, stage: int, first: int, end: int) -> Column | None:
        """The cheapest column of a stage that has its rank for itself, None where none fits."""
        number = self._in_flight(stage)
        key = (number, first, end)
        if key not in self._columns:
            mix = self._maker.cheapest(first, end, in_flight=number, capacity_bytes=self.room_bytes)
            self._columns[key] = None if mix is None else self._maker.column(first, end, mix)
        return self._columns[key]

    # -- one stage per rank: bottleneck by bisection ----------------------------------------------

    def best_partition(self) -> Partition | None:
        """A partition with the least bottleneck, and a proven bound on it in ``bound_s``.

        Returns:
            None where the model does not fit, however it is cut.
        """
        found = self._fill(float("inf"))
        if found is None:
            return None
        low = self._passing_s / self.configuration.degrees.pp
        high = max(column.microbatch_s for column in found)
        best = self._partition(found)
        for _ in range(_BISECTION_STEPS if self.configuration.degrees.pp > 1 else 0):
            middle = (low + high) / 2
            columns = self._fill(middle)
            if columns is None:
                low = middle
                continue
            high = min(middle, max(column.microbatch_s for column in columns))
            best = min(best, self._partition(columns), key=lambda p: p.objective_s)
            if high - low <= 1e-6 * high:
                break
        if self.configuration.degrees.pp == 1:
            self.bound_s = best.objective_s
        else:
            self.bound_s = max(self.bound_s, min(best.objective_s, self._bound_s(low)))
        return best

    def _partition(self, columns: Sequence[Column]) -> Partition:
        return Partition(
            columns=tuple(columns), objective_s=objective_s(self.configuration, columns)
        )

    def _fill(self, pace_s: float) -> list[Column] | None:
        """Fill stages from the front as far as the pace and the memory allow."""
        columns: list[Column] = []
        place = 0
        num_stages = self.configuration.num_stages
        for stage in range(num_stages):
            farthest = len(self.positions) - 1 - (num_stages - 1 - stage)
            end = self._farthest(stage, place, farthest, pace_s)
            if end is None:
                return None
            column = self._column(stage, self.positions[place], self.positions[end])
            assert column is not None
            columns.append(column)
            place = end
        return columns if place == len(self.positions) - 1 else None

    def _farthest(self, stage: int, place: int, limit: int, pace_s: float) -> int | None:
        """Last position at which a stage that starts at ``place`` may end."""
        low, high = place, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self._meets(stage, place, middle, pace_s):
                low = middle
            else:
                high = middle - 1
        return low if low > place else None

    def _meets(self, stage: int, start: int, end: int, pace_s: float) -> bool:
        column = self._column(stage, self.positions[start], self.positions[end])
        return column is not None and column.microbatch_s <= pace_s

    # -- columns ----------------------------------------------------------------------------------

    def problem(self, incumbent_s: float) -> StageProblem | None:
        """The columns that can be part of a step no slower than the incumbent.

        Returns:
            None where no such step exists.
        """
        slowest_s = self._slowest_s(incumbent_s)
        alone = self.configuration.virtual_stages == 1
        counted = self.counts_suffice
        stages: list[list[Column]] = []
        reached = {0}
        for stage in range(self.configuration.num_stages):
            runs = self._lengths(stage) if counted else self._runs(stage, reached, slowest_s)
            columns = [
                column
                for first, end in runs
                for column in self._columns_of(stage, first, end, alone=alone)
                if column.microbatch_s <= slowest_s
            ]
            reached = {column.end for column in columns}
            stages.append(columns)
        if not counted:
            stages = _joined(stages, len(self.table.units))
        if not all(stages):
            return None
        shared = self.table.memory.shared_bytes(0, len(self.table.units))
        return StageProblem(
            configuration=self.configuration,
            columns=tuple(tuple(columns) for columns in stages),
            room_bytes=None if alone else self.room_bytes,
            shared_bytes=float(shared),
            num_units=len(self.table.units) if counted else None,
        )

    def _slowest_s(self, incumbent_s: float) -> float:
        """Longest time per microbatch of a stage in a step no slower than the incumbent."""
        factor = pace_factor(self.configuration)
        if factor == 0:
            return float("inf")
        passing_s = self._passing_s / self.configuration.virtual_stages
        return (incumbent_s - passing_s - self._once_s) / factor * (1 + 1e-9)

    def _runs(self, stage: int, reached: set[int], slowest_s: float) -> Iterator[tuple[int, int]]:
        """Runs of units that a stage may hold in a step whose slowest stage takes ``slowest_s``.

        They start where the stage before may end, leave every later stage at least one unit,
        and leave no more than the later stages can take.
        """
        later = self.configuration.num_stages - 1 - stage
        limit = self.positions[len(self.positions) - 1 - later]
        last = self.positions[-1]
        for first in sorted(reached):
            for end in self.positions:
                if not first < end <= limit or (later == 0 and end != last):
                    continue
                if self._least_s(first, end) > slowest_s:
                    break
                if later == 0 or self._least_s(end, last) <= later * slowest_s:
                    yield first, end

    def _lengths(self, stage: int) -> Iterator[tuple[int, int]]:
        """One run for each length of a stage, where blocks are alike; it stands for all."""
        units, num_stages = len(self.table.units), self.configuration.num_stages
        longest = units - (num_stages - 1)
        if num_stages == 1:
            yield 0, units
        elif stage == 0:
            yield from ((0, length) for length in range(1, longest + 1))
        elif stage == num_stages - 1:
            yield from ((units - length, units) for length in range(1, longest + 1))
        else:
            yield from ((1, 1 + length) for length in range(1, min(longest, units - 2) + 1))

    def _least_s(self, first: int, end: int) -> float:
        """Kernels and collectives of a run, nothing recomputed, nothing exposed."""
        return self.table.total("compute", first, end) + self.table.total("tp", first, end)

    def _columns_of(self, stage: int, first: int, end: int, *, alone: bool) -> list[Column]:
        """Columns of a run: the cheapest that fits, or one for each kind on a shared rank.

        Stages that share a rank are searched within one unit of their even share: ranks take
        turns, and turns of different length would leave them waiting in ways that the ILP's
        objective does not see.
        """
        if alone:
            column = self._column(stage, first, end)
            return [] if column is None else [column]
        if abs(self._least_s(first, end) - self._even_s) > self._unit_s:
            return []
        if (first, end) not in self._shared_columns:
            mixes = self._maker.uniform_mixes(first, end)
            made = [self._maker.column(first, end, mix) for mix in mixes]
            self._shared_columns[first, end] = made
        return self._shared_columns[first, end]

    def least_memory(self) -> LeastMemory:
        """The fullest rank of an even cut with the recomputation that keeps the least."""
        pp = self.configuration.degrees.pp
        cuts = [self.positions[round(i * (len(self.positions) - 1) / pp)] for i in range(pp + 1)]
        found = []
        for stage, (first, end) in enumerate(pairwise(cuts)):
            mix = min(
                self._maker.uniform_mixes(first, end),
                key=lambda mix: mix.kept_bytes + mix.temporary_bytes,
            )
            number = self._in_flight(stage) if self.configuration.virtual_stages == 1 else pp
            found.append(
                LeastMemory(
                    memory=self.table.memory.peak(
                        [HeldStage(first=first, end=end, kinds=mix.kinds, in_flight=number)]
                    ),
                    rank=stage,
                    kinds=mix.kinds,
                )
            )
        return max(found, key=lambda need: need.memory.total_bytes)


def _joined(stages: list[list[Column]], end: int) -> list[list[Column]]:
    """Drop columns that no chain of columns from the first to the last unit contains."""
    reached = {0}
    forward = []
    for columns in stages:
        kept = [column for column in columns if column.first in reached]
        reached = {column.end for column in kept}
        forward.append(kept)
    needed = {end}
    backward = []
    for columns in reversed(forward):
        kept = [column for column in columns if column.end in needed]
        needed = {column.first for column in kept}
        backward.append(kept)
    return backward[::-1]
