"""Buffers that a forward changes: statistics of batches, running means, counters, codebooks.

A change is an op that writes in place. Kernels of batch normalisation write their running
statistics without saying so.
"""

from collections.abc import Iterator, Mapping, Sequence

from planner.graph.operator_graph import (
    OperatorGraph,
    OpNode,
    Phase,
    Storage,
    StorageKind,
    TensorValue,
)

_BATCH_NORMS = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})
_IS_TRAINING = 5
"""Position of the argument that says whether they write."""


def changes_of_buffers(
    ops: Sequence[OpNode], values: Sequence[TensorValue], storages: Sequence[Storage]
) -> Mapping[int, str]:
    """Names of the buffers that forward ops write into, by storage; in order of first changes."""
    written = (
        storages[values[value].storage]
        for op in ops
        if op.phase is Phase.FORWARD
        for value in written_values(op)
    )
    found = (each for each in written if each.kind is StorageKind.BUFFER)
    return {storage.id: storage.name for storage in found if storage.name}


def changed_buffers(graph: OperatorGraph) -> tuple[str, ...]:
    """Names of the buffers that forward changes."""
    return tuple(changes_of_buffers(graph.nodes, graph.values, graph.storages).values())


def buffers_that_steer(graph: OperatorGraph) -> tuple[str, ...]:
    """Those of them on which gradients depend.

    Training reads there what forwards before have left. On batch statistics gradients do not
    depend: evaluation alone reads them.
    """
    backward = {value for op in graph.nodes if op.phase is Phase.BACKWARD for value in op.inputs}
    changes = changes_of_buffers(graph.nodes, graph.values, graph.storages)
    return tuple(
        name
        for storage, name in changes.items()
        if not _made_of(graph, storage).isdisjoint(backward)
    )


def changed_parameters(graph: OperatorGraph) -> tuple[str, ...]:
    """Names of the parameters that forward ops write into."""
    written = (
        graph.storages[graph.values[value].storage]
        for op in graph.nodes
        if op.phase is Phase.FORWARD and not op.is_view
        for value in op.outputs
    )
    found = (each.name for each in written if each.kind is StorageKind.PARAMETER)
    return tuple(dict.fromkeys(name for name in found if name))


def written_values(op: OpNode) -> Iterator[int]:
    """What an op makes, and what it writes into without saying so."""
    if not op.is_view:
        yield from op.outputs
    if _is_training_norm(op):
        yield from op.inputs


def _is_training_norm(op: OpNode) -> bool:
    return op.name in _BATCH_NORMS and bool(op.arguments[_IS_TRAINING])


def _made_of(graph: OperatorGraph, storage: int) -> set[int]:
    """Forward values that are made of a buffer, itself apart; a norm in training reads it not."""
    own = {value.id for value in graph.values if value.storage == storage}
    found: set[int] = set()
    for op in graph.nodes:
        read = found if _is_training_norm(op) else found | own
        if op.phase is Phase.FORWARD and not read.isdisjoint(op.inputs):
            found.update(op.outputs)
    return found - own
