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
    """Those of them that samples change and on which gradients depend.

    Training reads there what samples before have left. On batch statistics gradients do not
    depend: evaluation alone reads them.
    """
    backward = {value for op in graph.nodes if op.phase is Phase.BACKWARD for value in op.inputs}
    changes = changes_of_buffers(graph.nodes, graph.values, graph.storages)
    told = _changed_by_samples(graph)
    return tuple(
        name
        for storage, name in changes.items()
        if storage in told and not _made_of(graph, storage).isdisjoint(backward)
    )


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


def _changed_by_samples(graph: OperatorGraph) -> set[int]:
    """Storages that are written by what depends on the model's inputs."""
    found = {
        value.id
        for value in graph.values
        if graph.storages[value.storage].kind is StorageKind.INPUT
    }
    written: set[int] = set()
    for op in graph.nodes:
        if op.phase is Phase.FORWARD and not found.isdisjoint(op.inputs):
            found.update(op.outputs)
            written.update(graph.values[value].storage for value in written_values(op))
    return written
