"""Collectives and transfers that each pipeline rank takes part in during a step.

They are those that the price of a plan is made of, counted: the layouts' own over tp, cp or ep,
FSDP2's over dp_shard (with cp) and dp_replicate as ``cost.data_parallel`` says, and those between
stages.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.cost.model_units import ModelWork
from planner.cost.unit_pricing import master_bytes
from planner.cost.unit_work import UnitWork
from planner.graph.operator_graph import CutPoint, OperatorGraph
from planner.plan.record import TrafficRow
from planner.plan.types import Plan, StagePlan
from planner.pricing.model_pricing import ModelPricer
from planner.pricing.op_rows import plan_choice
from planner.units import DTYPE_BYTES
from planner.vocabulary import Axis

_LOSS_BYTES = 16
"""What all ranks add up at the end of a step: the sum of losses and their number, in float64."""

_NORM_BYTES = 8
"""The norm of the gradient, in float64. Where one mesh holds all gradients, torch adds up the norm
of each in their dtype, over the shards alone."""


_EXPERT_SHARDS = "dp_shard_mod_ep"
"""The ranks that share the state of the same experts, as the script names them."""


@dataclass(frozen=True, slots=True)
class _Moved:
    """Equal collectives of one stage in a step."""

    kind: str
    axis: str
    count: int
    each_bytes: float


def traffic_rows(
    plan: Plan, pricer: ModelPricer, stages: Sequence[StagePlan]
) -> tuple[TrafficRow, ...]:
    """Count collectives of a plan.

    Args:
        plan: The plan.
        pricer: Prices of its model on the devices of some stages.
        stages: These stages, with all others on their ranks.
    """
    choice = plan_choice(plan)
    work, priced = pricer.work(choice), pricer.priced(choice)
    assert work is not None
    assert priced is not None
    counted = _Counted(plan, work, priced.graph)
    ranks = sorted({stage.pp_rank for stage in stages})
    return tuple(row for rank in ranks for row in counted.rows(rank))


class _Counted:
    """Counts of one plan."""

    def __init__(self, plan: Plan, work: ModelWork, graph: OperatorGraph) -> None:
        self._plan = plan
        self._work = work
        self._graph = graph
        self._cuts = {cut.after_unit + 1: cut for cut in graph.cuts}
        self._blocks = range(1, max(1, len(work.units) - work.epilogue_units))
        self._compute_bytes = DTYPE_BYTES[plan.dtype]
        self._master_bytes = master_bytes(plan.dtype)

    def rows(self, rank: int) -> Iterator[TrafficRow]:
        """Add up what a pipeline rank moves, equal kinds over one axis in a row."""
        counts: Counter[tuple[str, str]] = Counter()
        sizes: Counter[tuple[str, str]] = Counter()
        for moved in self._of_rank(rank):
            key = moved.axis, moved.kind
            counts[key] += moved.count
            sizes[key] += round(moved.count * moved.each_bytes)
        for axis, kind in sorted(counts):
            if counts[axis, kind] and self._size(axis) > 1:
                yield TrafficRow(
                    pp_rank=rank,
                    axis=axis,
                    kind=kind,
                    group_size=self._size(axis),
                    count=counts[axis, kind],
                    bytes=sizes[axis, kind],
                )

    def _size(self, axis: str) -> int:
        degrees = self._plan.degrees
        if axis == Axis.DP_SHARD:
            return degrees.shards
        if axis == _EXPERT_SHARDS:
            return degrees.expert_shards
        return degrees.world_size if axis == "world" else int(getattr(degrees, axis))

    def _of_rank(self, rank: int) -> Iterator[_Moved]:
        plan = self._plan
        stages = [stage for stage in plan.stages if stage.pp_rank == rank]
        if plan.degrees.splits_modules:
            for stage in stages:
                yield from self._between_parts(stage)
            yield from self._summed(stages)
        for stage in stages:
            yield from self._data_parallel(stage)
            if plan.degrees.pp > 1:
                yield from self._transfers(stage)
        if plan.degrees.pp > 1:
            yield from self._tied(rank)
        yield _Moved("all_reduce", "world", 1, _LOSS_BYTES)
        if plan.degrees.splits_modules or plan.degrees.pp > 1:
            yield _Moved("all_reduce", "world", 1, _NORM_BYTES)
        else:
            trained = sum(each.gradient is not None for each in self._graph.parameters)
            yield _Moved("all_reduce", Axis.DP_SHARD, 1, trained * self._master_bytes)

    # -- over tp, cp or ep ------------------------------------------------------------------------

    def _between_parts(self, stage: StagePlan) -> Iterator[_Moved]:
        """What the layouts of the units move in every microbatch."""
        axis = self._plan.degrees.split_axis
        for unit, kind in zip(self._units(stage), stage.activation_checkpointing, strict=True):
            passes = (unit.forward, unit.input_backward, unit.weight_backward, unit.recompute[kind])
            for comm in (comm for each in passes for comm in each.comm):
                over = comm.beside or axis
                yield _Moved(comm.kind, over, self._plan.num_microbatches, comm.num_bytes)

    def _summed(self, stages: list[StagePlan]) -> Iterator[_Moved]:
        """Gradients of whole parameters on a split stream, all in one."""
        elements = sum(u.summed_gradient_elements for s in stages for u in self._units(s))
        if elements:
            num_bytes = elements * self._master_bytes / self._plan.degrees.shards
            yield _Moved("all_reduce", Axis.TP, 1, num_bytes)

    def _units(self, stage: StagePlan) -> tuple[UnitWork, ...]:
        return self._work.units[stage.first_unit : stage.end_unit]

    # -- over data-parallel ranks -----------------------------------------------------------------

    def _data_parallel(self, stage: StagePlan) -> Iterator[_Moved]:
        """FSDP2's traffic of each group of parameters: a block, or all around the blocks."""
        degrees, microbatches = self._plan.degrees, self._plan.num_microbatches
        reshards, pipelined = self._plan.reshard_after_forward, degrees.pp > 1
        for trained, frozen, is_block, axis in self._groups(stage):
            if pipelined:
                # A backward leaves the parameters for the next forward.
                gathers, reductions = microbatches + 1 if reshards and is_block else 1, 1
            elif reshards:
                gathers, reductions = microbatches * (1 + is_block), microbatches
            else:
                gathers, reductions = 1, 1
            shards = self._size(axis)
            if shards > 1:
                gathered_bytes = (trained + frozen) * self._compute_bytes
                yield _Moved("all_gather", axis, gathers, gathered_bytes)
            if not trained:
                continue
            reduced_bytes = trained * self._master_bytes
            if shards > 1:
                yield _Moved("reduce_scatter", axis, reductions, reduced_bytes)
            if degrees.dp_replicate > 1:
                share_bytes = reduced_bytes / shards
                yield _Moved("all_reduce", Axis.DP_REPLICATE, 1, share_bytes)

    def _groups(self, stage: StagePlan) -> Iterator[tuple[int, int, bool, str]]:
        """Trained and frozen elements of each group, whether it is of a block, and its axis.

        What runs between blocks is gathered with all around them, as what several units read is.
        """
        held = range(stage.first_unit, stage.end_unit)
        units = self._work.units
        trained = frozen = 0
        for index in held:
            unit = units[index]
            if index not in self._blocks:
                trained += unit.trained_elements
                frozen += unit.frozen_elements
                continue
            outer = unit.outer_trained_elements, unit.outer_frozen_elements
            trained += outer[0]
            frozen += outer[1]
            experts = unit.experts_trained_elements, unit.experts_frozen_elements
            others = (
                unit.trained_elements - experts[0] - outer[0],
                unit.frozen_elements - experts[1] - outer[1],
            )
            if sum(others):
                yield *others, True, Axis.DP_SHARD
            if sum(experts):
                yield *experts, True, _EXPERT_SHARDS
        for tied in self._work.tied:
            copies = max(0, sum(unit in held for unit in tied.units) - 1) * tied.elements
            trained -= copies if tied.trained else 0
            frozen -= 0 if tied.trained else copies
        if trained + frozen:
            yield trained, frozen, False, Axis.DP_SHARD

    # -- between stages ---------------------------------------------------------------------------

    def _transfers(self, stage: StagePlan) -> Iterator[_Moved]:
        """What crosses the cuts before and behind a stage, and its gradients back.

        Stages of one rank hand it over.
        """
        microbatches, stages = self._plan.num_microbatches, self._plan.stages
        for first, kinds in ((stage.first_unit, "receive send"), (stage.end_unit, "send receive")):
            cut = self._cuts.get(first)
            if cut is None or not 0 < first < len(self._work.units):
                continue
            other = stages[stage.index + (1 if first == stage.end_unit else -1)]
            if other.pp_rank == stage.pp_rank:
                continue
            forward, backward = kinds.split()
            for num_bytes, has_gradient in self._crossing(cut):
                yield _Moved(forward, Axis.PP, microbatches, num_bytes)
                if has_gradient:
                    yield _Moved(backward, Axis.PP, microbatches, num_bytes)

    def _crossing(self, cut: CutPoint) -> Iterator[tuple[float, bool]]:
        """Bytes on a rank of each tensor that crosses, and whether its gradient comes back."""
        parts = plan_choice(self._plan).stream_parts
        for number in cut.values:
            value = self._graph.values[number]
            yield value.size_bytes / parts, value.requires_grad

    def _tied(self, rank: int) -> Iterator[_Moved]:
        """Gradients that stages with one weight tell each other."""
        for tied in self._work.tied:
            holders = [
                stage.pp_rank
                for stage in self._plan.stages
                if any(stage.first_unit <= unit < stage.end_unit for unit in tied.units)
            ]
            if not tied.trained or len(holders) < 2 or rank not in holders:
                continue
            num_bytes = tied.elements * self._master_bytes / self._plan.degrees.shards
            sent = holders.count(rank) * len({*holders} - {rank})
            yield _Moved("send", Axis.PP, sent, num_bytes)
            yield _Moved("receive", Axis.PP, len(holders) - holders.count(rank), num_bytes)
