"""How much memory a unit needs on one rank while it runs, what it keeps for backward included.

Its ops are replayed, forward and then backward, as ``planner.graph.analysis.lifetimes`` replays a
whole step: a storage lives from the op that makes it to the last that reads it, a saved one to
its last reader in the backward pass.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType

from planner.cost.work import Shares, backward_shares
from planner.graph.analysis.lifetimes import Moment, live_bytes, moments_of
from planner.graph.analysis.retained import saved_values
from planner.graph.operator_graph import OperatorGraph, OpNode, StorageKind

_NO_WORKSPACES: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPeaks:
    """Highest bytes of a unit's own storages, parameters apart."""

    forward_bytes: int
    """During forward, what is saved so far included."""
    backward_bytes: int
    """During backward, what is still saved included; gradients of parameters apart."""
    gradient_bytes: int
    """The same with the gradients of its parameters, each from when it is made to the end."""
    added_gradient_bytes: int
    """The same with each of them only while it is made: it is added to one that was there."""


_WHOLE = Shares()


def unit_peaks(
    graph: OperatorGraph,
    forward_ops: Sequence[int],
    backward_ops: Sequence[int],
    shares: Mapping[int, Shares],
    inner: Set[int] = frozenset(),
    workspaces: Mapping[int, int] = _NO_WORKSPACES,
) -> UnitPeaks:
    """Replay a unit.

    Args:
        graph: The model.
        forward_ops: Its forward ops in order.
        backward_ops: Its backward ops in order.
        shares: Share of each value on a rank, by forward op.
        inner: Storages that are never in memory: tensors inside a fused kernel.
        workspaces: Bytes that an op needs beside what it reads and makes.
    """
    moments = [*moments_of(graph, forward_ops), *moments_of(graph, backward_ops)]
    saved = {graph.values[value].storage for value in saved_values(graph, forward_ops)}
    num_forward = len(forward_ops)
    sizes = _storage_sizes(graph, (*forward_ops, *backward_ops), shares)
    sizes |= dict.fromkeys(inner & sizes.keys(), 0)
    last = _last_uses(moments, saved, num_forward)
    gradients = graph.parameter_gradients & sizes.keys()
    # A weight that units share: the other's gradient, and their sum, are there on some stages.
    joined = _joined_gradients(graph, backward_ops)
    own = {key: size for key, size in sizes.items() if key not in joined}

    def replayed(counted: Mapping[int, int], ends: Mapping[int, int]) -> list[int]:
        return [
            now_bytes + max(workspaces.get(op.id, 0) for op in moment.ops)
            for now_bytes, moment in zip(live_bytes(moments, counted, ends), moments, strict=True)
        ]

    without = replayed({key: size for key, size in sizes.items() if key not in gradients}, last)
    held = dict.fromkeys(graph.whole_gradients & sizes.keys(), len(moments))
    with_them = replayed(own, last | held)
    added = replayed(own, last)
    return UnitPeaks(
        forward_bytes=max(without[:num_forward], default=0),
        backward_bytes=max(without[num_forward:], default=0),
        gradient_bytes=max(with_them[num_forward:], default=0),
        added_gradient_bytes=max(added[num_forward:], default=0),
    )


def _joined_gradients(graph: OperatorGraph, backward_ops: Sequence[int]) -> set[int]:
    """Gradients of parameters that some ops read and do not make, and what is made with them."""
    made: set[int] = set()
    joined: set[int] = set()
    for op in (graph.nodes[op_id] for op_id in backward_ops):
        read = {graph.values[value].storage for value in op.inputs} & graph.parameter_gradients
        results = {graph.values[value].storage for value in op.outputs}
        foreign = read - made
        joined |= foreign
        if foreign:
            joined |= (results & graph.parameter_gradients) - made
        made |= results
    return joined


def loss_workspaces(
    graph: OperatorGraph, backward_ops: Sequence[int], sums: Set[int], shares: Mapping[int, Shares]
) -> dict[int, int]:
    """What backward of ops of a loss over a split vocabulary makes beyond that of a whole one.

    torch's loss_parallel adds the exponentials of the log-probabilities to its gradient in a
    tensor of its own.
    """
    found = {}
    for op in (graph.nodes[op_id] for op_id in backward_ops):
        forward = None if op.forward_op is None else graph.nodes[op.forward_op]
        if forward is not None and forward.id in sums and forward.name == "_log_softmax":
            share, outputs = shares[forward.id], forward.outputs
            found[op.id] = sum(int(graph.values[v].size_bytes * share(v)) for v in outputs)
    return found


def _storage_sizes(
    graph: OperatorGraph, op_ids: Sequence[int], shares: Mapping[int, Shares]
) -> dict[int, int]:
    """Bytes on one rank of each storage that the unit makes, gradients of parameters included."""
    sizes: dict[int, int] = {}
    for op in (graph.nodes[op_id] for op_id in op_ids):
        forward = op if op.forward_op is None else graph.nodes[op.forward_op]
        share = shares.get(forward.id, _WHOLE)
        for value, part in _parts(graph, op, forward, share):
            storage = graph.storages[graph.values[value].storage]
            if storage.kind is StorageKind.ACTIVATION:
                sizes.setdefault(storage.id, int(storage.size_bytes * part))
    return sizes


def _parts(
    graph: OperatorGraph, op: OpNode, forward: OpNode, share: Shares
) -> Iterator[tuple[int, float]]:
    """Each value that an op reads or makes, and the share of it that the rank holds."""
    reads, writes = backward_shares(graph, op, forward, share)
    yield from zip(op.inputs, reads, strict=True)
    yield from zip(op.outputs, writes, strict=True)


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
