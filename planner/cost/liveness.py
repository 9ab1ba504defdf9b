"""How much memory a unit needs on one rank while it runs, what it keeps for backward included.

Its ops are replayed, forward and then backward, as ``planner.graph.analysis.lifetimes`` replays a
whole step: a storage lives from the op that makes it to the last that reads it, a saved one to
its last reader in the backward pass.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod

from planner.cost.work import Shares
from planner.graph.analysis.lifetimes import Moment, live_bytes, moments_of
from planner.graph.analysis.retained import saved_values
from planner.graph.operator_graph import OperatorGraph, OpNode, StorageKind


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPeaks:
    """Highest bytes of a unit's own storages (parameters and their gradients apart)."""

    forward_bytes: int
    """During forward, what is saved so far included."""
    backward_bytes: int
    """During backward, what is still saved included."""


def unit_peaks(
    graph: OperatorGraph,
    forward_ops: Sequence[int],
    backward_ops: Sequence[int],
    shares: Mapping[int, Shares],
    inner: Set[int] = frozenset(),
) -> UnitPeaks:
    """Replay a unit.

    Args:
        graph: The model.
        forward_ops: Its forward ops in order.
        backward_ops: Its backward ops in order.
        shares: Share of each value on a rank, by forward op.
        inner: Storages that are never in memory: tensors inside a fused kernel.
    """
    moments = [*moments_of(graph, forward_ops), *moments_of(graph, backward_ops)]
    saved = {graph.values[value].storage for value in saved_values(graph, forward_ops)}
    num_forward = len(forward_ops)
    sizes = _storage_sizes(graph, (*forward_ops, *backward_ops), shares)
    found = live_bytes(
        moments,
        {storage: 0 if storage in inner else size for storage, size in sizes.items()},
        _last_uses(moments, saved, num_forward),
    )
    return UnitPeaks(
        forward_bytes=max(found[:num_forward], default=0),
        backward_bytes=max(found[num_forward:], default=0),
    )


def _forward_of(graph: OperatorGraph, op: OpNode) -> OpNode:
    """The forward op that a backward op differentiates (itself where unknown)."""
    return op if op.forward_op is None else graph.nodes[op.forward_op]


def _storage_sizes(
    graph: OperatorGraph, op_ids: Sequence[int], shares: Mapping[int, Shares]
) -> dict[int, int]:
    """Bytes on one rank of each activation storage of the unit; parameter gradients left out."""
    sizes: dict[int, int] = {}
    gradients: set[int] = set()
    for op in (graph.nodes[op_id] for op_id in op_ids):
        forward = _forward_of(graph, op)
        share = shares.get(forward.id)
        counts = _parameter_counts(graph, forward) if op is not forward else set()
        known = {*forward.inputs, *forward.outputs}
        for value in (*op.inputs, *op.outputs):
            tensor = graph.values[value]
            storage = graph.storages[tensor.storage]
            if storage.id in sizes or storage.id in gradients:
                continue
            if storage.kind is not StorageKind.ACTIVATION:
                continue
            if value not in known and value in op.outputs and prod(tensor.shape) in counts:
                gradients.add(storage.id)
                continue
            part = 1.0
            if share is not None:
                part = (
                    share(value)
                    if value in known
                    else _gradient_share(graph, value, forward, share)
                )
            sizes[storage.id] = int(storage.size_bytes * part)
    return sizes


def _parameter_counts(graph: OperatorGraph, forward: OpNode) -> set[int]:
    """Numbers of elements of the parameters that a forward op reads."""
    return {
        prod(graph.values[value].shape)
        for value in forward.inputs
        if graph.storages[graph.values[value].storage].kind is StorageKind.PARAMETER
    }


def _gradient_share(graph: OperatorGraph, value: int, forward: OpNode, share: Shares) -> float:
    """Share of a gradient: that of the forward value with as many elements."""
    count = prod(graph.values[value].shape)
    for known in (*forward.outputs, *forward.inputs):
        if prod(graph.values[known].shape) == count:
            return share(known)
    return 1.0


def _last_uses(moments: Sequence[Moment], saved: Set[int], num_forward: int) -> dict[int, int]:
    """Position of the moment after which each storage is free.

    What is saved but never read in backward (its reader belongs to another unit, or it is kept
    for its shape only) stays until the end.
    """
    last = {
        storage: position for position, moment in enumerate(moments) for storage in moment.touched
    }
    for storage in saved:
        if last.get(storage, 0) < num_forward:
            last[storage] = len(moments)
    return last
