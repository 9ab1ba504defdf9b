"""Collectives of a unit with its layouts chosen: where layouts change, and inside its loss."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from planner.cost.op import OpWork
from planner.cost.unit_work import CommWork, RankWork
from planner.cost.work import context_strategy, shares_of
from planner.framework.spec import KernelForms
from planner.graph.operator_graph import OperatorGraph, OpNode
from planner.runtime.layout import PARTIAL, Layout, shard
from planner.strategy.conversion import (
    Collective,
    conversion,
    copied_bytes,
    operand_bytes,
)
from planner.strategy.nodes import Node, NodeStrategy, RoutedRows
from planner.strategy.problem import ShardingProblem
from planner.vocabulary import Axis

Comm = Sequence[CommWork]
"""Collectives of one pass."""
Pair = tuple[Comm, Comm]
"""Collectives forward and backward."""

Conversions = tuple[tuple[int, Layout, Layout], ...]
"""Value, layout as made, layout as read."""


EXCHANGE = (shard(2), shard(1, 2))
"""Tokens for heads in (samples, heads, tokens, features): both are strewn, since queries, keys and
values are transposed views."""


def _whole(_: int) -> float:
    return 1.0


def gathered_values(chosen: Sequence[NodeStrategy], conversions: Conversions) -> frozenset[int]:
    """Values that are made split and read whole."""
    exits = [
        (value, strategy.layouts[value], layout)
        for strategy in chosen
        for value, layout in strategy.outputs.items()
        if value in strategy.layouts
    ]
    return frozenset(
        value
        for value, source, target in (*conversions, *exits)
        if source.is_shard and not target.is_shard
    )


def scattered_values(chosen: Sequence[NodeStrategy]) -> frozenset[int]:
    """Values that are made as sums over ranks and leave split."""
    return frozenset(
        value
        for strategy in chosen
        for value, layout in strategy.outputs.items()
        if layout.is_shard and strategy.layouts.get(value) == PARTIAL
    )


def joined_comm(parts: Iterable[Comm]) -> tuple[CommWork, ...]:
    """Collectives of several parts in order."""
    return tuple(comm for part in parts for comm in part)


def node_comm(
    problem: ShardingProblem, node: Node, strategy: NodeStrategy, chunks: int = 1
) -> tuple[list[Pair], list[Pair]]:
    """Collectives in front of a node and at its exits, each forward and backward.

    Where cp lies around the axis of the problem, a module's inputs come into their layout over the
    inner axis first, and its outputs over cp: each moves the part that the other leaves.
    ``chunks`` is how many parts the rows of a loss are taken in.
    """
    graph, ranks = problem.context.graph, problem.context.ranks
    outer = context_strategy(problem, node, strategy)
    if outer is None:
        return entry_comm(strategy), exit_comm(graph, strategy, ranks, chunks=chunks)
    around = problem.around
    assert around is not None
    own, context = shares_of(strategy, ranks), shares_of(outer, around.ranks)
    left = replace(context, layouts=outer.outputs)
    read = replace(own, layouts=strategy.inputs)
    second = [
        change_comm(graph, value, source, target, around.ranks, share=read(value))
        for value, source, target in around.conversions.get(node.index, ())
    ]
    entries = entry_comm(strategy) + [_over_context(pair) for pair in second]
    exits = exit_comm(graph, strategy, ranks, left=left, inside=context, chunks=chunks)
    beyond = exit_comm(graph, outer, around.ranks, left=own, inside=own)
    return entries, exits + [_over_context(pair) for pair in beyond]


def _over_context(pair: Pair) -> Pair:
    forward, backward = ([replace(each, beside=Axis.CP) for each in comm] for comm in pair)
    return forward, backward


def exit_comm(
    graph: OperatorGraph,
    strategy: NodeStrategy,
    ranks: int,
    *,
    left: Callable[[int], float] = _whole,
    inside: Callable[[int], float] = _whole,
    chunks: int = 1,
) -> list[Pair]:
    """Collectives at a node's exits, inside its loss and its attention, forward and backward.

    Args:
        graph: The model.
        strategy: The node's.
        ranks: Ranks of the axis.
        left: Share of a value that is left which another axis leaves a rank.
        inside: Share of a value inside the node which it does.
        chunks: Parts in which the rows of its loss are taken.
    """
    found = [
        change_comm(graph, value, strategy.layouts[value], layout, ranks, share=left(value))
        for value, layout in strategy.outputs.items()
        if value in strategy.layouts
    ]
    for sums in strategy.row_sums:
        share = inside(graph.nodes[sums.op].inputs[0]) / chunks
        row_bytes = sums.num_bytes * share
        row = CommWork(kind="all_reduce", num_bytes=row_bytes, copied_bytes=(row_bytes,))
        found.append(([row] * sums.forward * chunks, [row] * sums.backward * chunks))
    found += [([_work(graph, value, "all_reduce", ranks)], []) for value in strategy.summed_losses]
    for value, copies in strategy.exchanged.items():
        exchange = _work(
            graph, value, "all_to_all", ranks, share=copies * inside(value), layouts=EXCHANGE
        )
        found.append(([exchange], [exchange]))
    if strategy.routed is not None:
        rows = _exchange(strategy.routed.rows_bytes)
        found.append(([rows], [rows]))
    return found


def entry_comm(strategy: NodeStrategy) -> list[Pair]:
    """Collectives in front of a node: how many rows go to each expert, the rows and weights."""
    routed = strategy.routed
    if routed is None:
        return []
    rows, weights = _exchange(routed.rows_bytes), _exchange(routed.weights_bytes)
    counts = _exchange(routed.counts_bytes)
    return [([counts, rows, weights], [rows, *([weights] if routed.has_trained_weights else [])])]


def _exchange(num_bytes: int) -> CommWork:
    return CommWork(kind="all_to_all", num_bytes=num_bytes, beside=Axis.EP)


def routing_works(routed: RoutedRows) -> tuple[list[OpWork], list[OpWork]]:
    """Kernels that put rows in the order of their experts, and add up their gradients."""
    return [_moved(routed.rows_bytes)], [_moved(routed.rows_bytes)]


def return_works(routed: RoutedRows) -> tuple[list[OpWork], list[OpWork]]:
    """Kernels that put results in the order of the rows and add up those of each; gradients."""
    added = OpWork(
        kind="reduction",
        flop=0,
        read_bytes=routed.rows_bytes,
        write_bytes=routed.rows_bytes / routed.experts_of_row,
    )
    return [_moved(routed.rows_bytes), added], [_moved(routed.rows_bytes)]


def _moved(rows_bytes: int) -> OpWork:
    return OpWork(kind="embedding", flop=0, read_bytes=rows_bytes, write_bytes=rows_bytes)


def left_share(problem: ShardingProblem, value: int) -> float:
    """Share of a value that cp around the axis of a problem leaves a rank between nodes."""
    around = problem.around
    if around is None:
        return 1.0
    return 1 / around.ranks if around.left.get(value, around.boundary).is_shard else 1.0


def boundary_comm(
    problem: ShardingProblem,
    chosen: Sequence[NodeStrategy],
    conversions: Conversions,
    own_ops: frozenset[int],
) -> tuple[tuple[CommWork, ...], tuple[CommWork, ...]]:
    """Collectives behind a unit's nodes and at changes of layout, forward and backward.

    Args:
        problem: The unit.
        chosen: The strategy of each node.
        conversions: Changes of layout in front of modules.
        own_ops: Nodes count all of whose ops are among these.
    """
    ends = [
        pair
        for node, strategy in zip(problem.folded.nodes, chosen, strict=True)
        if node.ops and own_ops.issuperset(node.ops)
        for side in node_comm(problem, node, strategy)
        for pair in side
    ]
    found = ends + [conversion_comm(problem, *change) for change in conversions]
    return joined_comm(forward for forward, _ in found), joined_comm(back for _, back in found)


def chunked_comm(
    problem: ShardingProblem,
    chosen: Sequence[NodeStrategy],
    held: Callable[[OpNode], bool],
    chunks: int,
) -> tuple[CommWork, ...]:
    """Collectives of the nodes that run in chunks, backward as well, in the forward pass.

    Args:
        problem: The unit.
        chosen: The strategy of each node.
        held: Tells ops that do; others of their nodes follow these.
        chunks: How many.
    """
    graph = problem.context.graph
    found = [
        pair
        for node, strategy in zip(problem.folded.nodes, chosen, strict=True)
        if any(held(graph.nodes[op]) for op in node.ops)
        for side in node_comm(problem, node, strategy, chunks)
        for pair in side
    ]
    return joined_comm(one for pair in found for one in pair)


def conversion_comm(problem: ShardingProblem, value: int, source: Layout, target: Layout) -> Pair:
    """Collectives of a change of layout between nodes of a unit, forward and backward."""
    share = left_share(problem, value)
    graph, ranks = problem.context.graph, problem.context.ranks
    return change_comm(graph, value, source, target, ranks, share=share)


def change_comm(
    graph: OperatorGraph,
    value: int,
    source: Layout,
    target: Layout,
    ranks: int,
    *,
    share: float = 1.0,
) -> Pair:
    """Collectives of a change of layout of one value, forward and backward.

    Args:
        graph: The model.
        value: The value.
        source: Its layout as it is made.
        target: Its layout as it is read.
        ranks: Ranks of the axis.
        share: What another axis leaves a rank of it.
    """
    change = conversion(source, target)
    has_gradient = graph.values[value].requires_grad
    layouts = source, target
    forward, backward = (
        [] if kind is None else [_work(graph, value, kind, ranks, share=share, layouts=layouts)]
        for kind in (change.forward, change.backward if has_gradient else None)
    )
    return forward, backward


def _work(
    graph: OperatorGraph,
    value: int,
    kind: Collective,
    ranks: int,
    *,
    share: float = 1.0,
    layouts: tuple[Layout, ...] = (),
) -> CommWork:
    tensor = graph.values[value]
    num_bytes = operand_bytes(kind, tensor.size_bytes * share, ranks)
    copies = copied_bytes(kind, tensor.shape, layouts, num_bytes)
    return CommWork(kind=kind, num_bytes=num_bytes, copied_bytes=copies)


def rank_work(ops: Iterable[OpWork], comm: Sequence[CommWork], kernels: KernelForms) -> RankWork:
    """Kernels and collectives of a pass, with the copies that a framework makes for these."""
    sizes = [size for each in comm for size in each.copied_bytes if kernels.copies_operands]
    copies = [OpWork(kind="memory", flop=0.0, read_bytes=n, write_bytes=n) for n in sizes]
    return RankWork(ops=(*ops, *copies), comm=tuple(comm))
