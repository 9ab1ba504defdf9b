"""From a solved configuration to a plan."""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.cost.breakdown import CostBreakdown, MemoryBreakdown
from planner.cost.simulate import simulate_s
from planner.cost.stage_memory import HeldStage
from planner.cost.stage_table import StageSeconds, StageTable
from planner.graph.operator_graph import OperatorGraph, UnitKind
from planner.plan.types import ModelRef, Plan, StagePlan
from planner.search.columns import Column
from planner.search.configuration_search import ConfigurationSearch
from planner.search.model_pricing import PricedModel
from planner.search.sharding_ilp import ShardingSolution
from planner.search.stage_ilp import pace_factor, pace_s
from planner.strategy.configuration import MESH_ORDER, Configuration
from planner.strategy.facts import SEQUENCE_DIM
from planner.strategy.layout import REPLICATE, Layout
from planner.strategy.nodes import NodeKind, NodeStrategy
from planner.strategy.schedules import (
    NO_SCHEDULE,
    actions_by_rank,
    in_flight,
    rank_of_stage,
)
from planner.strategy.sharding import ModuleSharding, UnitSharding


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanContext:
    """What every plan of a search has in common."""

    model: ModelRef
    """What is trained."""
    global_batch_size: int
    """Samples per step."""
    dtype: str
    """Compute dtype."""


def decode_plan(
    search: ConfigurationSearch, columns: Sequence[Column], context: PlanContext
) -> Plan:
    """Write down a choice of columns as a plan."""
    configuration, table, graph = search.configuration, search.table, search.priced.graph
    seconds = [
        table.seconds_with(column.first, column.end, column.mix.recompute_s) for column in columns
    ]
    samples = context.global_batch_size / graph.microbatch_size
    return Plan(
        model=context.model,
        degrees=configuration.degrees,
        mesh_order=MESH_ORDER,
        schedule=configuration.schedule,
        virtual_stages=configuration.virtual_stages,
        microbatch_size=configuration.microbatch_size,
        num_microbatches=configuration.num_microbatches,
        global_batch_size=context.global_batch_size,
        dtype=context.dtype,
        reshard_after_forward=configuration.reshard_after_forward,
        sequence_parallel=configuration.sequence_parallel,
        sequence_dim=SEQUENCE_DIM,
        units=tuple(unit.name for unit in graph.units),
        tied_parameters=tuple(p.names for p in graph.parameters if len(p.names) > 1),
        shardings=unit_shardings(search.priced) if configuration.degrees.tp > 1 else (),
        stages=_stages(search, columns, seconds),
        memory_by_rank=_memory_by_rank(configuration, table, columns),
        costs=step_costs(configuration, seconds),
        simulated_step_time_s=_simulated_s(configuration, seconds),
        tokens_per_step=context.global_batch_size * graph.tokens_per_sample,
        flop_per_step=round((graph.forward_flop + graph.backward_flop) * samples),
    )


def _stages(
    search: ConfigurationSearch, columns: Sequence[Column], seconds: Sequence[StageSeconds]
) -> tuple[StagePlan, ...]:
    configuration, table = search.configuration, search.table
    cut_before = {cut.after_unit + 1: cut for cut in search.priced.graph.cuts}
    found = []
    for index, (column, time) in enumerate(zip(columns, seconds, strict=True)):
        rank = rank_of_stage(index, configuration.degrees.pp)
        local = index // configuration.degrees.pp
        most = max(counts[local] for counts in _in_flight(configuration, rank))
        forward_s = time.forward_share * time.microbatch_s
        cut = cut_before[column.first] if index else None
        found.append(
            StagePlan(
                index=index,
                pp_rank=rank,
                first_unit=column.first,
                end_unit=column.end,
                activation_checkpointing=column.mix.kinds,
                forward_s=forward_s,
                backward_s=time.microbatch_s - forward_s,
                memory=table.memory.peak([_held(column, most)]),
                carried=cut.carried if cut else (),
                stream_output=cut.stream_output if cut else None,
            )
        )
    return tuple(found)


def _in_flight(configuration: Configuration, rank: int) -> tuple[tuple[int, ...], ...]:
    return in_flight(
        configuration.schedule,
        pp=configuration.degrees.pp,
        virtual_stages=configuration.virtual_stages,
        num_microbatches=configuration.num_microbatches,
        rank=rank,
    )


def _memory_by_rank(
    configuration: Configuration, table: StageTable, columns: Sequence[Column]
) -> tuple[MemoryBreakdown, ...]:
    """Each rank at its fullest moment."""
    pp = configuration.degrees.pp
    return tuple(
        max(
            (
                table.memory.peak(
                    [
                        _held(column, number)
                        for column, number in zip(columns[rank::pp], counts, strict=True)
                    ]
                )
                for counts in _in_flight(configuration, rank)
            ),
            key=lambda memory: memory.total_bytes,
        )
        for rank in range(pp)
    )


def _held(column: Column, in_flight: int) -> HeldStage:
    return HeldStage(
        first=column.first, end=column.end, kinds=column.mix.kinds, in_flight=in_flight
    )


def step_costs(configuration: Configuration, seconds: Sequence[StageSeconds]) -> CostBreakdown:
    """Split the ILP's objective by cause, as the slowest rank sees it."""
    pp, m = configuration.degrees.pp, configuration.num_microbatches
    ranks = [seconds[rank::pp] for rank in range(pp)]
    slowest = max(ranks, key=lambda held: sum(time.microbatch_s for time in held))
    last = max(ranks, key=lambda held: sum(t.step_comm_s + t.optimizer_s for t in held))
    stage_s = [time.microbatch_s for time in seconds]
    running_s = sum(stage_s) / configuration.virtual_stages
    running_s += pace_factor(configuration) * pace_s(configuration, stage_s)
    return CostBreakdown(
        compute_s=m * sum(time.compute_s for time in slowest),
        recompute_s=m * sum(time.recompute_s for time in slowest),
        tp_comm_s=m * sum(time.tp_comm_s for time in slowest),
        pp_comm_s=m * sum(time.pp_comm_s for time in slowest),
        dp_comm_s=m * sum(time.dp_comm_s for time in slowest)
        + sum(time.step_comm_s for time in last),
        bubble_s=max(0.0, running_s - m * sum(t.microbatch_s for t in slowest)) if pp > 1 else 0.0,
        optimizer_s=sum(time.optimizer_s for time in last),
    )


def _simulated_s(configuration: Configuration, seconds: Sequence[StageSeconds]) -> float:
    """Step time by the schedule's own order of actions."""
    pp = configuration.degrees.pp
    once_s = max(
        sum(time.step_comm_s + time.optimizer_s for time in seconds[rank::pp]) for rank in range(pp)
    )
    if configuration.schedule == NO_SCHEDULE:
        return configuration.num_microbatches * seconds[0].microbatch_s + once_s
    actions = actions_by_rank(
        configuration.schedule,
        pp=pp,
        virtual_stages=configuration.virtual_stages,
        num_microbatches=configuration.num_microbatches,
    )
    forward = [time.forward_share * time.microbatch_s for time in seconds]
    backward = [time.microbatch_s - part for time, part in zip(seconds, forward, strict=True)]
    simulated_s = simulate_s(
        actions, forward_s=forward, backward_s=backward, transfer_s=[0.0] * (len(seconds) - 1)
    )
    return simulated_s + once_s


def unit_shardings(priced: PricedModel) -> tuple[UnitSharding, ...]:
    """Tensor-parallel instructions for the script, by structure."""
    found = []
    for structure, solution in priced.solutions.items():
        units = tuple(u.index for u in priced.graph.units if u.structure == structure)
        modules = _modules(priced.graph, solution)
        if modules:
            found.append(UnitSharding(units=units, modules=modules))
    return tuple(found)


def _modules(graph: OperatorGraph, solution: ShardingSolution) -> tuple[ModuleSharding, ...]:
    unit = solution.problem.unit
    prefix = f"{unit.name}." if unit.kind is UnitKind.BLOCK else ""
    stream = solution.problem.boundary
    gathered = {v for v, source, _ in solution.conversions if source.is_shard and source != stream}
    local_readers = _values_read_by_dtensor_regions(solution)
    found = []
    for node, strategy in zip(solution.problem.folded.nodes, solution.chosen, strict=True):
        if node.kind is not NodeKind.MODULE:
            continue
        if _runs_as_is(strategy) and gathered.isdisjoint(node.inputs):
            continue
        (output, leaving), *_ = strategy.outputs.items() or ((-1, REPLICATE),)
        ndim = len(graph.values[output].shape) if output >= 0 else 0
        entering = next(iter(strategy.inputs.values()), REPLICATE)
        module = node.module.removeprefix(prefix) if node.module != unit.name else ""
        found.append(
            ModuleSharding(
                module=module,
                style=strategy.style,
                fused=strategy.fused,
                input_layout=_spelled(entering, _input_ndim(graph, strategy)),
                output_layout=_spelled(leaving, ndim),
                output_is_local=output not in local_readers,
            )
        )
    return tuple(found)


def _runs_as_is(strategy: NodeStrategy) -> bool:
    """Whether a module needs no instruction: whole parameters, whole input, whole output.

    A whole input that comes as the stream's shard is gathered by the runtime without one; what
    comes out of a split region is not.
    """
    layouts = (*strategy.inputs.values(), *strategy.outputs.values())
    return strategy.style == "replicate" and all(layout == REPLICATE for layout in layouts)


def _values_read_by_dtensor_regions(solution: ShardingSolution) -> frozenset[int]:
    return frozenset(
        value
        for strategy in solution.chosen
        if strategy.needs_dtensor
        for value, layout in strategy.inputs.items()
        if layout.is_shard
    )


def _input_ndim(graph: OperatorGraph, strategy: NodeStrategy) -> int:
    return max((len(graph.values[value].shape) for value in strategy.inputs), default=0)


def _spelled(layout: Layout, ndim: int) -> str:
    """Layout as the script spells it; the feature dim counts from the end."""
    if not layout.is_shard:
        return "Replicate"
    return "Shard(-1)" if layout.dim == ndim - 1 else f"Shard({layout.dim})"
