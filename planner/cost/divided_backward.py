"""What a unit holds while the weights' part of its backward is left.

torch (``torch.distributed.pipelining._backward``, 2.13) runs the part for the inputs first. It
keeps the whole graph of autograd from the ops that read parameters on towards the inputs, with all
that they saved, and the gradient of what each op that reads a parameter has made: from there the
second part goes on. Only what lies behind the last such op is gone, as the loss behind the head.
"""

from collections.abc import Iterator, Mapping, Sequence

from planner.cost.work import Shares, backward_shares
from planner.graph.operator_graph import OperatorGraph, OpNode, StorageKind


def waiting_gradient_bytes(
    graph: OperatorGraph,
    forward_ops: Sequence[int],
    backward_ops: Sequence[int],
    shares: Mapping[int, Shares],
) -> int:
    """Bytes on a rank of the gradients that the second part starts from, each storage once.

    Args:
        graph: The model.
        forward_ops: Forward ops of a unit, in order.
        backward_ops: Its backward ops, in order.
        shares: Share of each value on a rank, by forward op.
    """
    readers = {op.id for op in _readers(graph, forward_ops)}
    behind = [graph.nodes[op] for op in backward_ops if graph.nodes[op].forward_op in readers]
    own = {
        (op.forward_op, graph.values[value].storage)
        for op in behind
        if not op.is_view
        for value in op.outputs
    }
    found: dict[int, int] = {}
    for op in behind:
        assert op.forward_op is not None
        reads, _ = backward_shares(graph, op, graph.nodes[op.forward_op], shares[op.forward_op])
        for value, part in zip(op.inputs, reads, strict=True):
            storage = graph.storages[graph.values[value].storage]
            is_gradient = storage.kind is StorageKind.ACTIVATION and storage.gradient_of is not None
            if is_gradient and (op.forward_op, storage.id) not in own:
                found[storage.id] = int(storage.size_bytes * part)
    return sum(found.values())


def waiting_ops(graph: OperatorGraph, forward_ops: Sequence[int]) -> list[int]:
    """Ops of the last unit of a model whose saved tensors wait for the second part.

    Those that read a parameter, and all that these depend on.
    """
    readers = {op.id for op in _readers(graph, forward_ops)}
    needed: set[int] = set()
    found = []
    for op in (graph.nodes[op_id] for op_id in reversed(forward_ops)):
        if op.id in readers or not needed.isdisjoint(op.outputs):
            needed.update(op.inputs)
            found.append(op.id)
    return found[::-1]


def _readers(graph: OperatorGraph, forward_ops: Sequence[int]) -> Iterator[OpNode]:
    """Ops that join a trained parameter, or what is made of such alone, with an activation."""
    weights: set[int] = set()
    for op in (graph.nodes[op_id] for op_id in forward_ops):
        storages = [graph.storages[graph.values[value].storage] for value in op.inputs]
        for value, storage in zip(op.inputs, storages, strict=True):
            if storage.kind is StorageKind.PARAMETER and graph.values[value].requires_grad:
                weights.add(value)
        if weights.isdisjoint(op.inputs):
            continue
        joins = any(
            value not in weights
            and (storage.kind is StorageKind.ACTIVATION or storage.kind.is_of_batch)
            for value, storage in zip(op.inputs, storages, strict=True)
        )
        if joins:
            yield op
        else:
            weights.update(op.outputs)
