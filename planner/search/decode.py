"""From a solved configuration to a plan."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.cost.held_stage import HeldStage
from planner.cost.kinds import CostsOfKinds
from planner.cost.stage_costs import StageCosts
from planner.cost.step import StageChoice, StepPrice, price_step
from planner.graph.operator_graph import OperatorGraph
from planner.plan.types import ModelRef, Plan, StagePlan
from planner.pricing.instructions import module_shardings
from planner.pricing.model_pricing import LaidOut
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
    return plan_of(search.costs, search.laid_out(columns), stages, context)


def plan_of(
    costs: StageCosts | CostsOfKinds,
    laid_out: Sequence[LaidOut],
    stages: Sequence[StageChoice],
    context: PlanContext,
) -> Plan:
    """Price stages and write them down as a plan.

    Args:
        costs: Prices of a configuration.
        laid_out: The model under its layouts: runs of units that make all of it.
        stages: What each stage holds.
        context: What it shares with other plans.
    """
    configuration, graph = costs.configuration, laid_out[0].priced.graph
    price = price_step(costs, stages)
    samples = context.global_batch_size / graph.microbatch_size
    return Plan(
        model=context.model,
        degrees=configuration.degrees,
        mesh_order=configuration.mesh_order,
        device_order=configuration.device_order,
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
        shardings=unit_shardings(laid_out) if configuration.degrees.splits_modules else (),
        stages=_stages(costs, graph, stages, price),
        memory_by_rank=price.memory_by_rank,
        costs=price.costs,
        tokens_per_step=context.global_batch_size * graph.tokens_per_sample,
        compile=configuration.compile,
        float8=configuration.float8,
        loss_chunks=configuration.loss_chunks,
        cpu_offload=configuration.cpu_offload,
        activation_offload=configuration.activation_offload,
        host_bytes_by_rank=_host_bytes(costs, stages),
        loss_module=context.loss_module if configuration.loss_chunks > 1 else "",
        state_form=configuration.state_form,
        flop_per_step=round((graph.forward_flop + graph.backward_flop) * samples),
    )


def _host_bytes(costs: StageCosts | CostsOfKinds, stages: Sequence[StageChoice]) -> tuple[int, ...]:
    """Host memory that a rank of each pipeline rank needs, where something lies there."""
    configuration = costs.configuration
    if not (configuration.cpu_offload or configuration.activation_offload):
        return ()

    def on_host(index: int) -> int:
        stage = stages[index]
        memory = costs.of_stage(index).memory
        return round(memory.host_bytes(stage.first, stage.end, stage.kinds))

    return tuple(
        sum(map(on_host, configuration.stages_of(rank))) for rank in range(configuration.degrees.pp)
    )


def _stages(
    costs: StageCosts | CostsOfKinds,
    graph: OperatorGraph,
    stages: Sequence[StageChoice],
    price: StepPrice,
) -> tuple[StagePlan, ...]:
    pp = costs.configuration.degrees.pp
    cut_before = {cut.after_unit + 1: cut for cut in graph.cuts}
    found = []
    for index, (choice, seconds) in enumerate(zip(stages, price.stages, strict=True)):
        rank = costs.configuration.rank_of(index)
        memory = costs.of_stage(index).memory.peak(
            *(
                [HeldStage(first=choice.first, end=choice.end, kinds=choice.kinds, moment=at)]
                for at in dict.fromkeys(moment[index // pp] for moment in price.moments[rank])
            )
        )
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
                memory=memory,
                carried=cut.carried if cut else (),
                stream_output=cut.stream_output if cut else None,
            )
        )
    return tuple(found)


def unit_shardings(laid_out: Sequence[LaidOut]) -> tuple[UnitSharding, ...]:
    """Instructions for the script over each axis, by structure."""
    return tuple(sharding for each in laid_out for sharding in _shardings_of(each))


def _shardings_of(run: LaidOut) -> Iterator[UnitSharding]:
    priced = run.priced
    for solutions, refused in ((priced.solutions, priced.whole), (priced.context, {})):
        for structure, solution in solutions.items():
            units = tuple(
                unit.index
                for unit in priced.graph.units
                if unit.structure == structure and unit.index in run.units
            )
            modules, whole = module_shardings(solution), refused.get(structure, ())
            if units and (modules or whole):
                axis = solution.problem.context.axis
                yield UnitSharding(axis=axis, units=units, modules=modules, whole=whole)
