"""Every forward op of a plan with its price on one rank: the rows of ops.csv."""

from collections.abc import Iterator, Sequence

from planner.cost.node_pricing import (
    RankSpec,
    backward_ops_by_forward,
    conversion_s,
    forward_op_s,
    price_node,
)
from planner.cost.work import forward_work, shares_in
from planner.graph.operator_graph import Unit
from planner.plan.record import OpRow
from planner.plan.types import Plan, StagePlan
from planner.pricing.choice import ShardingChoice
from planner.pricing.model_pricing import ModelPricer, PricedModel
from planner.pricing.sharding_ilp import ShardingSolution
from planner.strategy.placement import mesh_strides
from planner.vocabulary import Style


def plan_choice(plan: Plan) -> ShardingChoice:
    """The choice of layouts that a plan was priced under."""
    styles = {m.style for sharding in plan.shardings for m in sharding.modules}
    return ShardingChoice(
        tp=plan.degrees.tp,
        cp=plan.degrees.cp,
        ep=plan.degrees.ep,
        sequence_parallel=plan.sequence_parallel,
        split_tables=Style.VOCAB_EMBEDDING in styles,
        microbatch_size=plan.microbatch_size,
        compile=plan.compile,
        float8=plan.float8,
        loss_chunks=plan.loss_chunks,
        activation_offload=plan.activation_offload,
    )


def op_rows(plan: Plan, pricer: ModelPricer, stages: Sequence[StagePlan]) -> tuple[OpRow, ...]:
    """Price forward ops of a plan one by one, in execution order.

    Args:
        plan: The plan.
        pricer: Prices of its model on the devices of some stages.
        stages: These stages.
    """
    choice = plan_choice(plan)
    priced = pricer.priced(choice)
    assert priced is not None
    rank = pricer.rank(choice, strides=mesh_strides(pricer.cluster, plan.degrees, plan.mesh_order))
    stage_of_unit = {
        unit: stage.index for stage in stages for unit in range(stage.first_unit, stage.end_unit)
    }
    by_structure = {
        structure: _unit_rows(solution, priced, rank)
        for structure, solution in priced.solutions.items()
    }
    return tuple(
        row
        for unit in priced.graph.units
        if unit.index in stage_of_unit
        for row in _placed(by_structure[unit.structure], unit, priced, stage_of_unit[unit.index])
    )


_Row = tuple[str, str, float, float, float]
"""Op name, placement, compute seconds, communication seconds, bytes."""


def _unit_rows(solution: ShardingSolution, priced: PricedModel, rank: RankSpec) -> list[_Row]:
    """Rows of a unit's representative, in the order of its forward ops."""
    graph = priced.graph
    problem = solution.problem
    entering = {value: (p, q) for value, p, q in solution.conversions}
    rows: dict[int, _Row] = {}
    backward_ops = backward_ops_by_forward(problem)
    for node, strategy in zip(problem.folded.nodes, solution.chosen, strict=True):
        price = price_node(problem, node, strategy, rank, backward_ops)
        share = shares_in(problem, node, strategy)
        for position, op_id in enumerate(node.ops):
            op = graph.nodes[op_id]
            work = forward_work(graph, op, share)
            comm_s = price.forward_comm_s if position == len(node.ops) - 1 else 0.0
            for value in op.inputs if node.inputs else ():
                if value in entering and value in node.inputs:
                    comm_s += conversion_s(problem, value, *entering.pop(value), rank)[0]
            placement = strategy.layouts.get(op.outputs[0]) if op.outputs else None
            rows[op_id] = (
                op.name,
                str(placement) if placement is not None else "Replicate",
                0.0 if op.is_view else forward_op_s(problem, op, share, rank),
                comm_s,
                work.read_bytes + work.write_bytes,
            )
    return [rows[op] for op in problem.unit.forward_ops]


def _placed(rows: list[_Row], unit: Unit, priced: PricedModel, stage: int) -> Iterator[OpRow]:
    """Rows of one unit from those of its representative."""
    for op_id, (name, placement, compute_s, comm_s, num_bytes) in zip(
        unit.forward_ops, rows, strict=True
    ):
        yield OpRow(
            op=name,
            unit=unit.name,
            module=priced.graph.nodes[op_id].module,
            stage=stage,
            placement=placement,
            compute_s=compute_s,
            comm_s=comm_s,
            bytes=round(num_bytes),
        )
