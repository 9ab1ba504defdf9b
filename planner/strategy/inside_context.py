"""The problem of layouts over tp of what a rank of cp has of a unit."""

from dataclasses import replace

from planner.runtime.layout import shard
from planner.strategy.nodes import Node, NodeStrategy
from planner.strategy.problem import ContextLayouts, ShardingProblem, misfit_of
from planner.strategy.region_strategies import HEADS
from planner.strategy.unit_context import UnitContext, fits


def inside_context(problem: ShardingProblem, around: ContextLayouts) -> ShardingProblem:
    """The same problem on the parts that ranks of cp have of the unit.

    What is local to the ranks of each axis by itself is local to those of both where the sizes that
    both split divide: the sequence of the stream, and the heads inside attention.
    """
    both = replace(problem.context, ranks=problem.context.ranks * around.ranks)
    has_parts = around.boundary != problem.boundary or misfit_of(problem.folded, both) is None
    strategies = tuple(
        tuple(
            _within(each, around)
            for each in ways
            if has_parts and _leaves_heads(node, each, problem.context, around)
            and _leaves_rows(node, each, both, around)
        )
        for node, ways in zip(problem.folded.nodes, problem.strategies, strict=True)
    )  # fmt: skip
    return replace(problem, strategies=strategies, around=around)


def _within(strategy: NodeStrategy, around: ContextLayouts) -> NodeStrategy:
    """A strategy on a part that a rank of cp has: rows go to experts once for both axes."""
    routed = strategy.routed
    return strategy if routed is None else replace(strategy, routed=routed.within(around.ranks))


def _leaves_heads(
    node: Node, strategy: NodeStrategy, context: UnitContext, around: ContextLayouts
) -> bool:
    """Whether attention has as many heads for each rank of cp of those that tp leaves it."""
    graph = context.graph
    queries = {op.inputs[0] for op in map(graph.nodes.__getitem__, node.ops) if op.inputs}
    return all(
        graph.values[query].shape[HEADS] // context.ranks % around.ranks == 0
        for query in queries & around.chosen[node.index].exchanged.keys()
        if strategy.layouts.get(query) == shard(HEADS)
    )


def _leaves_rows(
    node: Node, strategy: NodeStrategy, both: UnitContext, around: ContextLayouts
) -> bool:
    """Whether ranks of both axes have equal parts of the rows of experts that others share."""
    if strategy.routed is None:
        return True
    is_shared = around.chosen[node.index].routed is not None
    return is_shared and all(fits(value, part, both) for value, part in strategy.inputs.items())
