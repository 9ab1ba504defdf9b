"""Collectives of a unit with its layouts chosen: where layouts change, and inside its loss."""

from collections.abc import Iterable, Sequence

from planner.cost.op import OpWork
from planner.cost.unit_work import CommWork
from planner.graph.operator_graph import OperatorGraph
from planner.runtime.layout import Layout
from planner.strategy.conversion import Collective, conversion, operand_bytes
from planner.strategy.nodes import NodeStrategy, RoutedRows

Comm = Sequence[CommWork]
"""Collectives of one pass."""

Conversions = tuple[tuple[int, Layout, Layout], ...]
"""Value, layout as made, layout as read."""


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


def joined_comm(parts: Iterable[Comm]) -> tuple[CommWork, ...]:
    """Collectives of several parts in order."""
    return tuple(comm for part in parts for comm in part)


def exit_comm(graph: OperatorGraph, strategy: NodeStrategy, ranks: int) -> list[tuple[Comm, Comm]]:
    """Collectives at a node's exits, inside its loss and its attention, forward and backward."""
    found = [
        change_comm(graph, value, strategy.layouts[value], layout, ranks)
        for value, layout in strategy.outputs.items()
        if value in strategy.layouts
    ]
    for sums in strategy.row_sums:
        row = CommWork(kind="all_reduce", num_bytes=sums.num_bytes)
        found.append(([row] * sums.forward, [row] * sums.backward))
    found += [([_work(graph, value, "all_reduce", ranks)], []) for value in strategy.summed_losses]
    for value, copies in strategy.exchanged.items():
        exchange = _work(graph, value, "all_to_all", ranks, copies=copies)
        found.append(([exchange], [exchange]))
    if strategy.routed is not None:
        rows = _exchange(strategy.routed.rows_bytes)
        found.append(([rows], [rows]))
    return found


def entry_comm(strategy: NodeStrategy) -> list[tuple[Comm, Comm]]:
    """Collectives in front of a node: how many rows go to each expert, the rows and weights."""
    routed = strategy.routed
    if routed is None:
        return []
    rows, weights = _exchange(routed.rows_bytes), _exchange(routed.weights_bytes)
    counts = _exchange(routed.counts_bytes)
    return [([counts, rows, weights], [rows, *([weights] if routed.has_trained_weights else [])])]


def _exchange(num_bytes: int) -> CommWork:
    return CommWork(kind="all_to_all", num_bytes=num_bytes, over_experts=True)


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


def change_comm(
    graph: OperatorGraph, value: int, source: Layout, target: Layout, ranks: int
) -> tuple[Comm, Comm]:
    """Collectives of a change of layout of one value, forward and backward."""
    change = conversion(source, target)
    has_gradient = graph.values[value].requires_grad
    forward, backward = (
        [] if kind is None else [_work(graph, value, kind, ranks)]
        for kind in (change.forward, change.backward if has_gradient else None)
    )
    return forward, backward


def _work(
    graph: OperatorGraph, value: int, kind: Collective, ranks: int, *, copies: int = 1
) -> CommWork:
    tensor_bytes = graph.values[value].size_bytes * copies
    return CommWork(kind=kind, num_bytes=operand_bytes(kind, tensor_bytes, ranks))
