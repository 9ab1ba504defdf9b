"""Memory while ops run: every storage from the op that makes it to its last use.

Ops are replayed in moments. In forward a moment is one op. In backward it is one
node of autograd, whose ops (the two products of a linear layer's gradient) share what they read
and make until the node returns; the sum of a gradient with one that came before is its own.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.graph.operator_graph import OperatorGraph, OpNode, StorageKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Ops whose storages are freed together."""

    ops: tuple[OpNode, ...]
    """What runs, in order."""
    touched: frozenset[Hashable]
    """What they read and make: storages, or other names of pieces of memory."""


def moments_of(graph: OperatorGraph, op_ids: Iterable[int]) -> list[Moment]:
    """Group ops, in execution order, into moments; see the module's description."""
    groups: list[list[OpNode]] = []
    seen: set[int] = set()
    for op_id in op_ids:
        op = graph.nodes[op_id]
        if groups and same_node(groups[-1][-1], op) and not _sums_gradients(op, seen):
            groups[-1].append(op)
        else:
            groups.append([op])
            seen = set()
        seen.update(op.inputs, op.outputs)
    return [
        Moment(
            ops=tuple(ops),
            touched=activation_storages(
                graph, (value for op in ops for value in (*op.inputs, *op.outputs))
            ),
        )
        for ops in groups
    ]


def by_op(graph: OperatorGraph, moments: Sequence[Moment]) -> list[Moment]:
    """Take the backward of functions of one's own apart into moments of one op each.

    What a node of torch makes on the way is there until it returns: C++ frees what an expression
    has made at its end. Python frees it as it goes, but for what enters and leaves.
    """
    touches = Counter(storage for moment in moments for storage in moment.touched)
    found: list[Moment] = []
    for moment in moments:
        is_own = all(op.is_of_function for op in moment.ops)
        found += _ops_of(graph, moment, touches) if is_own else [moment]
    return found


def _ops_of(
    graph: OperatorGraph, moment: Moment, touches: Mapping[Hashable, int]
) -> Iterator[Moment]:
    made: set[Hashable] = set()
    freed: set[Hashable] = set()
    for op in moment.ops:
        read, touched = (
            activation_storages(graph, values) for values in (op.inputs, (*op.inputs, *op.outputs))
        )
        freed |= {storage for storage in made & read if touches[storage] == 1}
        made |= touched - read
        is_last = op is moment.ops[-1]
        yield Moment(ops=(op,), touched=touched | (moment.touched - freed if is_last else set()))


def live_bytes(
    moments: Sequence[Moment], sizes: Mapping[Any, int], last: Mapping[Any, int]
) -> list[int]:
    """Replay moments.

    Args:
        moments: In order.
        sizes: Bytes of each piece of memory; others count nothing.
        last: Position of the moment after which each piece is free.

    Returns:
        Bytes alive during each moment.
    """
    freed: list[list[Hashable]] = [[] for _ in moments]
    for piece, position in last.items():
        if position < len(moments):
            freed[position].append(piece)
    live: set[Hashable] = set()
    now_bytes = 0
    found = []
    for moment, pieces in zip(moments, freed, strict=True):
        for piece in moment.touched - live:
            if piece in sizes:
                live.add(piece)
                now_bytes += sizes[piece]
        found.append(now_bytes)
        for piece in pieces:
            if piece in live:
                live.remove(piece)
                now_bytes -= sizes[piece]
    return found


def same_node(before: OpNode, op: OpNode) -> bool:
    """Tell whether two ops are of one node of autograd."""
    return before.forward_op is not None and before.forward_op == op.forward_op


def _sums_gradients(op: OpNode, seen: set[int]) -> bool:
    """Tell whether autograd adds a gradient to one from another node, after a node has run."""
    return op.name == "add" and not seen.issuperset(op.inputs)


def activation_storages(graph: OperatorGraph, values: Iterable[int]) -> frozenset[int]:
    """Activation storages of some values."""
    storages = (graph.storages[graph.values[value].storage] for value in values)
    return frozenset(each.id for each in storages if each.kind is StorageKind.ACTIVATION)
