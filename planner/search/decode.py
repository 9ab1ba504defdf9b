"""From a solved configuration to a plan."""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.cost.held_stage import HeldStage
from planner.cost.stage_costs import StageCosts
from planner.cost.step import StageChoice, StepPrice, price_step
from planner.plan.types import ModelRef, Plan, StagePlan
from planner.pricing.instructions import module_shardings
from planner.pricing.model_pricing import PricedModel
from planner.search.columns import Column
from planner.search.configuration_search import ConfigurationSearch
from planner.strategy.facts import SEQUENCE_DIM
from planner.strategy.sharding import UnitSharding

_LOSS = ("loss",)
"""Name of the loss where it is a unit of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanContext:
    """What every plan of a search has in common."""

    model: ModelRef
    """What is trained."""
    global_batch_size: int
    """Samples per step."""
    dtype: str
    """Compute dtype."""
    loss_module: str = ""
    """Module that makes the logits, where the loss can be taken in chunks of rows."""


def decode_plan(
    search: ConfigurationSearch, columns: Sequence[Column], context: PlanContext
) -> Plan:
    """Write down a choice of columns as a plan."""
    stages = [
        StageChoice(first=column.first, end=column.end, kinds=column.mix.kinds)
        for column in columns
    ]
    return plan_of(search.table, search.priced, stages, context)


def plan_of(
    costs: StageCosts, priced: PricedModel, stages: Sequence[StageChoice], context: PlanContext
) -> Plan:
    """Price stages and write them down as a plan.

    Args:
        costs: Prices of a configuration.
        priced: The model under its layouts.
        stages: What each stage holds.
        context: What it shares with other plans.
    """
    configuration, graph = costs.configuration, priced.graph
    price = price_step(costs, stages)
    samples = context.global_batch_size / graph.microbatch_size
    return Plan(
        model=context.model,
        degrees=configuration.degrees,
        mesh_order=configuration.mesh_order,
        schedule=configuration.schedule,
        virtual_stages=configuration.virtual_stages,
        microbatch_size=configuration.microbatch_size,
        num_microbatches=configuration.num_microbatches,
        global_batch_size=context.global_batch_size,
        dtype=context.dtype,
        reshard_after_forward=configuration.reshard_after_forward,
        sequence_parallel=configuration.sequence_parallel,
        sequence_dim=SEQUENCE_DIM,
        units=(*(unit.name for unit in graph.units), *_LOSS[: costs.model.epilogue_units - 1]),
        tied_parameters=tuple(p.names for p in graph.parameters if len(p.names) > 1),
        shardings=unit_shardings(priced) if configuration.degrees.splits_modules else (),
        stages=_stages(costs, priced, stages, price),
        memory_by_rank=price.memory_by_rank,
        costs=price.costs,
        tokens_per_step=context.global_batch_size * graph.tokens_per_sample,
        compile=configuration.compile,
        float8=configuration.float8,
        loss_chunks=configuration.loss_chunks,
        cpu_offload=configuration.cpu_offload,
        host_bytes_by_rank=_host_bytes(costs, stages),
        loss_module=context.loss_module if configuration.loss_chunks > 1 else "",
        state_form=configuration.state_form,
        flop_per_step=round((graph.forward_flop + graph.backward_flop) * samples),
    )


def _host_bytes(costs: StageCosts, stages: Sequence[StageChoice]) -> tuple[int, ...]:
    """Host memory that a rank of each pipeline rank needs, where states are offloaded."""
    configuration = costs.configuration
    if not configuration.cpu_offload:
        return ()
    return tuple(
        sum(
            round(costs.memory.host_bytes(stages[index].first, stages[index].end))
            for index in configuration.stages_of(rank)
        )
        for rank in range(configuration.degrees.pp)
    )


def _stages(
    costs: StageCosts, priced: PricedModel, stages: Sequence[StageChoice], price: StepPrice
) -> tuple[StagePlan, ...]:
    pp = costs.configuration.degrees.pp
    cut_before = {cut.after_unit + 1: cut for cut in priced.graph.cuts}
    found = []
    for index, (choice, seconds) in enumerate(zip(stages, price.stages, strict=True)):
        rank = costs.configuration.rank_of(index)
        peaks = [
            costs.memory.peak(
                [HeldStage(first=choice.first, end=choice.end, kinds=choice.kinds, moment=at)]
            )
            for at in dict.fromkeys(moment[index // pp] for moment in price.moments[rank])
        ]
        # There is no cut where the loss begins, which other frameworks alone have apart.
        cut = cut_before.get(choice.first) if index else None
        found.append(
            StagePlan(
                index=index,
                pp_rank=rank,
                first_unit=choice.first,
                end_unit=choice.end,
                activation_checkpointing=choice.kinds,
                forward_s=seconds.forward_s,
                backward_s=seconds.backward_s,
                weight_backward_s=costs.configuration.divides_backward * seconds.weight_backward_s,
                memory=max(peaks, key=lambda memory: memory.total_bytes),
                carried=cut.carried if cut else (),
                stream_output=cut.stream_output if cut else None,
            )
        )
    return tuple(found)


def unit_shardings(priced: PricedModel) -> tuple[UnitSharding, ...]:
    """Instructions for the script over each axis, by structure."""
    found = []
    for solutions, refused in ((priced.solutions, priced.whole), (priced.context, {})):
        for structure, solution in solutions.items():
            units = tuple(u.index for u in priced.graph.units if u.structure == structure)
            modules, whole = module_shardings(solution), refused.get(structure, ())
            if modules or whole:
                axis = solution.problem.context.axis
                found.append(UnitSharding(axis=axis, units=units, modules=modules, whole=whole))
    return tuple(found)
