"""What stays in memory between forward and backward, and what recomputation runs again.

A block's activations are kept in one of three ways:

* *none*: what autograd saves for backward, as traced;
* *full*: the tensors that enter the block alone; its forward ops run again in backward;
* *selective*: the same and the outputs of matrix products, convolutions and fused attention, so
  that only the cheap ops run again.

This is torch's non-reentrant checkpoint around the block's forward, as the training script
applies it. Prologue and epilogue always keep what autograd saves. Sizes are those of storages,
each counted once however many tensors view it. Left out are parameters and buffers, which live
anyway, the model's inputs, which units share, and the states of random generators that checkpoints
stash.
"""

from collections.abc import Iterator, Sequence

from planner.graph.operator_graph import OperatorGraph, OpNode, StorageKind, Unit, UnitKind
from planner.vocabulary import RECOMPUTATIONS, Recomputation

KEPT_BY_SELECTIVE = frozenset(
    {
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "convolution",
        "_grouped_mm",
        "_scaled_mm_v2",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    }
)
"""Ops whose outputs selective recomputation keeps."""


def block_ops(unit: Unit) -> tuple[int, ...]:
    """Forward ops of a unit's block, which are recomputed together."""
    return unit.forward_ops[: unit.num_block_ops]


def saved_values(graph: OperatorGraph, op_ids: Sequence[int]) -> frozenset[int]:
    """Values that autograd saves on behalf of some forward ops, parameters included."""
    return frozenset(
        value
        for op_id in op_ids
        for value in (*graph.nodes[op_id].saved_inputs, *graph.nodes[op_id].saved_outputs)
    )


def entering_values(graph: OperatorGraph, unit: Unit) -> frozenset[int]:
    """Activations that a block reads in forward and that were made before it."""
    ops = block_ops(unit)
    made = {value for op_id in ops for value in graph.nodes[op_id].outputs}
    return frozenset(
        value
        for op_id in ops
        for value in graph.nodes[op_id].inputs
        if value not in made and _is_activation(graph, value)
    )


def cached_values(graph: OperatorGraph, unit: Unit) -> frozenset[int]:
    """Values of a block that selective recomputation keeps besides what enters."""
    return frozenset(
        value
        for op_id in block_ops(unit)
        if graph.nodes[op_id].name in KEPT_BY_SELECTIVE
        for value in graph.nodes[op_id].outputs
    )


def kept_storages(graph: OperatorGraph, unit: Unit, recomputation: str) -> frozenset[int]:
    """Storages of activations that a unit keeps between forward and backward.

    Args:
        graph: The model.
        unit: One of its units.
        recomputation: One of ``RECOMPUTATIONS``; "none" for prologue and epilogue.
    """
    assert recomputation in RECOMPUTATIONS, recomputation
    assert recomputation == Recomputation.NONE or unit.kind is UnitKind.BLOCK, unit.name
    if recomputation == Recomputation.NONE:
        values = saved_values(graph, unit.forward_ops)
    else:
        between = unit.forward_ops[unit.num_block_ops :]
        values = entering_values(graph, unit) | saved_values(graph, between)
        if recomputation == Recomputation.SELECTIVE:
            values |= cached_values(graph, unit)
    return frozenset(
        graph.values[value].storage for value in values if _is_activation(graph, value)
    )


def recomputed_ops(graph: OperatorGraph, unit: Unit, recomputation: str) -> tuple[int, ...]:
    """Forward ops of a unit that run again in backward, in order.

    torch's checkpoint stops as soon as every saved tensor is back. Inputs are saved before an op
    runs and outputs after it, so that the last projection of a transformer block, whose input is
    the last saved tensor, is not computed again.

    Args:
        graph: The model.
        unit: One of its units.
        recomputation: One of ``RECOMPUTATIONS``.
    """
    if recomputation == Recomputation.NONE:
        return ()
    ops = [graph.nodes[op_id] for op_id in block_ops(unit)]
    again = ops[: _end_of_saving(ops)]
    if recomputation == Recomputation.SELECTIVE:
        again = [op for op in again if op.name not in KEPT_BY_SELECTIVE]
    return tuple(op.id for op in again)


def stop_of(graph: OperatorGraph, unit: Unit) -> int | None:
    """Forward op at which recomputing a unit's whole block stops, None where it runs to its end."""
    ops = block_ops(unit)
    num_again = len(recomputed_ops(graph, unit, Recomputation.FULL))
    return ops[num_again] if num_again < len(ops) else None


def retained_storages(graph: OperatorGraph, recomputation: str | Sequence[str]) -> frozenset[int]:
    """Storages of activations that the whole model keeps between forward and backward.

    Args:
        graph: The model.
        recomputation: That of every block, or one for each unit.
    """
    kept: frozenset[int] = frozenset()
    for unit, each in zip(graph.units, by_unit(graph, recomputation), strict=True):
        kept |= kept_storages(graph, unit, each)
    return kept


def retained_bytes(graph: OperatorGraph, recomputation: str | Sequence[str]) -> int:
    """Bytes of ``retained_storages`` for one microbatch; ``saved_bytes`` where it is "none"."""
    kept = retained_storages(graph, recomputation)
    return sum(graph.storages[storage].size_bytes for storage in kept)


def recompute_flop(graph: OperatorGraph, recomputation: str | Sequence[str]) -> int:
    """FLOPs that recomputation adds to the backward pass.

    Args:
        graph: The model.
        recomputation: That of every block, or one for each unit.
    """
    return sum(
        graph.nodes[op_id].flop
        for unit, each in zip(graph.units, by_unit(graph, recomputation), strict=True)
        for op_id in recomputed_ops(graph, unit, each)
    )


def recompute_refusals(graph: OperatorGraph) -> dict[str, str]:
    """Find the recomputations under which the model would fail in backward, with the reason.

    A checkpoint holds what enters the block and, under "selective", what is kept inside of it. It
    raises in backward where that was changed in place meanwhile.

    Returns:
        A clause by recomputation: "relu_ in layers.0 changes in place what addmm made, ...".
    """
    refusals: dict[str, str] = {}
    never = len(graph.nodes)
    held_from = {each: _held_from(graph, each) for each in RECOMPUTATIONS[1:]}
    for unit, op, storage, made in _overwrites(graph):
        for recomputation, first in held_from.items():
            if op.id >= first.get(storage, never):
                reason = (
                    f"{op.name} in {unit.name} changes in place what {made.name} made, which is "
                    "held for backward (versions of such ops that are not in place can be)"
                )
                refusals.setdefault(recomputation, reason)
    return refusals


def by_unit(graph: OperatorGraph, recomputation: str | Sequence[str]) -> tuple[str, ...]:
    """Spell out the recomputation of every block as one for each unit."""
    if not isinstance(recomputation, str):
        return tuple(recomputation)
    return tuple(
        recomputation if unit.kind is UnitKind.BLOCK else Recomputation.NONE for unit in graph.units
    )


def _is_activation(graph: OperatorGraph, value: int) -> bool:
    storage = graph.storages[graph.values[value].storage]
    return storage.kind is StorageKind.ACTIVATION


def _held_from(graph: OperatorGraph, recomputation: str) -> dict[int, int]:
    """First op from which on the checkpoints of all blocks hold a storage as it is."""
    first: dict[int, int] = {}
    for unit in graph.units:
        for value in entering_values(graph, unit):
            first.setdefault(graph.values[value].storage, unit.forward_ops[0])
        if recomputation == Recomputation.SELECTIVE:
            for value in cached_values(graph, unit):
                first[graph.values[value].storage] = unit.forward_ops[0]
    return first


def _overwrites(graph: OperatorGraph) -> Iterator[tuple[Unit, OpNode, int, OpNode]]:
    """Unit, op, storage and the op that made it, of all that forward changes in place."""
    maker: dict[int, OpNode] = {}
    for unit in graph.units:
        for op in (graph.nodes[op_id] for op_id in unit.forward_ops):
            if op.is_view:
                continue
            for storage in {graph.values[value].storage for value in op.outputs}:
                if storage in maker:
                    yield unit, op, storage, maker[storage]
                maker.setdefault(storage, op)


def _end_of_saving(ops: Sequence[OpNode]) -> int:
    """Return how many of the ops run before every saved tensor is there."""
    end = 0
    for position, op in enumerate(ops):
        if op.saved_outputs or not set(op.outputs).isdisjoint(op.saved_in_vain):
            end = position + 1
        elif op.saved_inputs or op.saved_in_vain:
            end = position
    return end
