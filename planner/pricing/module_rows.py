"""Which modules of a plan are split over an axis, and why others stay whole."""

from collections.abc import Iterator, Mapping, Sequence

from planner.graph.operator_graph import OperatorGraph, Parameter
from planner.plan.record import ModuleRow
from planner.plan.types import Plan, StagePlan
from planner.pricing.model_pricing import ModelPricer
from planner.pricing.op_rows import plan_choice
from planner.pricing.sharding_ilp import ShardingSolution
from planner.strategy.nodes import Node, NodeKind
from planner.vocabulary import Axis, Style, split_styles

_WHOLE = "whole"


def module_rows(
    plan: Plan, pricer: ModelPricer, stages: Sequence[StagePlan]
) -> tuple[ModuleRow, ...]:
    """List the modules that hold a matrix, once for each kind of unit; nothing where none is split.

    Over ep those of experts alone.

    Args:
        plan: The plan.
        pricer: Prices of its model on the devices of some stages.
        stages: These stages.
    """
    choice = plan_choice(plan)
    priced = pricer.priced(choice) if choice.ranks > 1 else None
    if priced is None:
        return ()
    refused = {
        unit: {each.module: each.reason for each in sharding.whole}
        for sharding in plan.shardings
        for unit in sharding.units
    }
    names: dict[str, list[str]] = {}
    first: dict[str, int] = {}
    held = range(stages[0].first_unit, stages[-1].end_unit)
    for unit in (each for each in priced.graph.units if each.index in held):
        names.setdefault(unit.structure, []).append(unit.name)
        first.setdefault(unit.structure, unit.index)
    return tuple(
        row
        for structure, units in names.items()
        for row in _unit_rows(
            priced.solutions[structure],
            tuple(units),
            choice.ranks,
            refused.get(first[structure], {}),
        )
    )


def _unit_rows(
    solution: ShardingSolution, units: tuple[str, ...], ranks: int, refused: Mapping[str, str]
) -> Iterator[ModuleRow]:
    problem = solution.problem
    graph, unit = problem.context.graph, problem.unit
    matrices = {
        parameter.storage: parameter
        for parameter in (graph.parameters[index] for index in unit.parameters)
        if sum(size > 1 for size in parameter.shape) > 1
    }
    seen: set[str] = set()
    for node, chosen in zip(problem.folded.nodes, solution.chosen, strict=True):
        for op in (graph.nodes[op] for op in node.ops):
            read = [graph.values[value].storage for value in op.inputs]
            found = next((matrices[storage] for storage in read if storage in matrices), None)
            if found is None or op.module in seen:
                continue
            seen.add(op.module)
            is_split = chosen.style in split_styles(problem.context.axis)
            if problem.context.axis is Axis.EP and not is_split:
                continue  # all but experts run as on one device
            path = unit.path_of(op.module)
            yield ModuleRow(
                units=units,
                module=path,
                how=str(chosen.style) if is_split else _WHOLE,
                reason=""
                if is_split
                else refused.get(path) or _reason(solution, node, found, graph, ranks),
            )


def _reason(
    solution: ShardingSolution, node: Node, matrix: Parameter, graph: OperatorGraph, ranks: int
) -> str:
    """Why a module stays whole."""
    axis = solution.problem.context.axis
    ways = solution.problem.strategies[node.index]
    if solution.chosen[node.index].style == Style.ON_PART:
        return "it is small, and runs on a part of the sequence"
    if node.kind is not NodeKind.MODULE:
        return "it works as no nn.Linear or nn.Embedding does"
    if any(strategy.style in split_styles(axis) for strategy in ways):
        return "splitting it is no faster"
    if axis is Axis.CP:
        return "no rule says how its ops run on a part of the sequence"
    if matrix.storage in graph.table_storages and matrix.shape[0] % ranks:
        return f"{matrix.shape[0]} rows do not divide over {ranks} ranks"
    sizes = " x ".join(map(str, matrix.shape))
    if all(size % ranks for size in matrix.shape):
        return f"{sizes} does not divide over {ranks} ranks"
    return f"no split of its {sizes} fits what it reads and hands on"
