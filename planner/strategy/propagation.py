"""Layouts followed through an op: by its rule, and by what holds for every op.

Given the layouts of an op's inputs, ``output_layouts`` says which layouts its outputs have, or
that the op cannot run so without communication. Inputs that are constants of the step (rotary
tables, masks, index ranges) have layout None: a DTensor region slices them as needed.

Whatever a rule says, whole inputs that a gradient flows to stay out of ops on shards, since each
rank would add its part of the gradient only; memory that is written to must be split as the
result is; and no op runs on the summands of a sum over ranks.
"""

from collections.abc import Sequence

from planner.graph.operator_graph import OperatorGraph, OpNode
from planner.runtime.layout import PARTIAL, REPLICATE, Layout, can_shard
from planner.runtime.op_call import Call, Found, Operand, Shape
from planner.runtime.op_rules import MATMULS, rule_of
from planner.runtime.product_rules import product_layouts


def output_layouts(
    graph: OperatorGraph, op: OpNode, layouts: Sequence[Layout | None], tp: int
) -> tuple[Layout | None, ...] | None:
    """Propagate layouts through one op that owns no parameters.

    Args:
        graph: The graph of the op.
        op: The op.
        layouts: One per input; None for a constant, or for what has its gradient summed over
            the ranks by other means.
        tp: Ranks of the axis.

    Returns:
        One layout per output (None where the output is a constant), or None where the op
        cannot run on these layouts.
    """
    if all(layout is None for layout in layouts):
        return (None,) * len(op.outputs)
    if all(layout is None or layout == REPLICATE for layout in layouts):
        return (REPLICATE,) * len(op.outputs)
    key = "layouts", op.id, tp, *layouts
    if key not in graph.known:  # most choices for the values of a unit have it alike
        graph.known[key] = _propagated(graph, op, layouts, tp)
    found: tuple[Layout, ...] | None = graph.known[key]
    return found


def _propagated(
    graph: OperatorGraph, op: OpNode, layouts: Sequence[Layout | None], tp: int
) -> tuple[Layout, ...] | None:
    """Layouts of the outputs of an op on a shard; arguments as for ``output_layouts``."""
    if PARTIAL in layouts or _has_partial_gradient(graph, op, layouts):
        return None
    operands = [
        Operand(graph.values[value].shape, layout)
        for value, layout in zip(op.inputs, layouts, strict=True)
    ]
    targets = [graph.values[value].shape for value in op.outputs]
    if any(each.split and not can_shard(each.shape, each.split, tp) for each in operands):
        return None
    found = _found(Call(op, operands, targets), tp)
    if found is None or not _fit(targets, found, tp) or _spoils_memory(graph, op, layouts, found):
        return None
    return tuple(found)


def _found(call: Call, tp: int) -> Found:
    """Ask the op's rule; a sum over ranks, as products may leave, is for modules alone."""
    if call.op.name in MATMULS:
        found, _ = product_layouts(call, tp)
        return None if found is None or PARTIAL in found else found
    rule = rule_of(call.op)
    return None if rule is None else rule(call, tp)


def _has_partial_gradient(
    graph: OperatorGraph, op: OpNode, layouts: Sequence[Layout | None]
) -> bool:
    """Whether a whole input would get a part of its gradient on each rank."""
    return any(graph.values[value].requires_grad for value in op.outputs) and any(
        layout is not None and not layout.is_shard and graph.values[value].requires_grad
        for value, layout in zip(op.inputs, layouts, strict=True)
    )


def _fit(targets: Sequence[Shape], found: Sequence[Layout], tp: int) -> bool:
    """Whether every output has the dim that its layout splits, and it splits evenly."""
    return len(found) == len(targets) and all(
        not layout.is_shard or (layout.dim < len(shape) and can_shard(shape, layout, tp))
        for shape, layout in zip(targets, found, strict=True)
    )


def _spoils_memory(
    graph: OperatorGraph, op: OpNode, layouts: Sequence[Layout | None], found: Sequence[Layout]
) -> bool:
    """Whether an op writes to memory that is not split as its result is.

    An op that is no view and leaves a result in the memory of an input has written there. Where
    it leaves several, other views of that memory have changed too, in layouts of their own.
    """
    if op.is_view:
        return False
    read = {graph.values[v].storage: layout for v, layout in zip(op.inputs, layouts, strict=True)}
    written = [graph.values[value].storage for value in op.outputs]
    return any(
        storage in read and (read[storage] != layout or written.count(storage) > 1)
        for storage, layout in zip(written, found, strict=True)
    )
