"""The layouts in which a region of glue can run without communication inside."""

from collections.abc import Mapping, Sequence

from planner.graph.operator_graph import OpNode
from planner.runtime.layout import REPLICATE, Layout, can_shard
from planner.strategy.module_strategies import UnitContext
from planner.strategy.nodes import Node, NodeStrategy
from planner.strategy.propagation import output_layouts

MAX_STRATEGIES = 256
"""Assignments kept per region; a region with more (dozens of inputs) runs replicated only."""

_LOSS_OPS = frozenset({"_log_softmax", "nll_loss_forward"})


def region_strategies(
    node: Node, context: UnitContext, candidates: Mapping[int, Sequence[Layout]]
) -> tuple[NodeStrategy, ...]:
    """Enumerate the consistent assignments of layouts to a region.

    Layouts of values from outside are branched over, those inside follow op by op.

    Args:
        node: The region.
        context: Its unit.
        candidates: For each input of the node, the layouts in which it can be had.

    Returns:
        Strategies, the replicated one first; each differs from the others in some input.
    """
    partial: list[dict[int, Layout | None]] = [{}]
    entering = set(node.inputs)
    for op_id in node.ops:
        op = context.graph.nodes[op_id]
        for value in op.inputs:
            if value in entering:
                # A value that its module cannot give in any allowed layout has no candidates.
                partial = _branch(partial, value, candidates.get(value, ()), context)
        partial = [
            extended for layouts in partial if (extended := _run(op, layouts, context)) is not None
        ]
        if len(partial) > MAX_STRATEGIES:
            partial = [layouts for layouts in partial if _all_replicated(layouts)]
    return tuple(_strategy(node, layouts, context) for layouts in partial)


def _branch(
    partial: list[dict[int, Layout | None]],
    value: int,
    candidates: Sequence[Layout],
    context: UnitContext,
) -> list[dict[int, Layout | None]]:
    """Extend each assignment by each layout of a value that is still open."""
    shape = context.graph.values[value].shape
    legal = [
        layout
        for layout in candidates
        if not layout.is_shard or (layout.dim < len(shape) and can_shard(shape, layout, context.tp))
    ]
    extended = []
    for layouts in partial:
        if value in layouts:
            extended.append(layouts)
        else:
            extended += [{**layouts, value: layout} for layout in legal]
    return extended


def _run(
    op: OpNode, layouts: dict[int, Layout | None], context: UnitContext
) -> dict[int, Layout | None] | None:
    """Add the layouts of an op's outputs, None where the op cannot run on its inputs."""
    known = [
        REPLICATE if context.is_parameter(value) else layouts.get(value) for value in op.inputs
    ]
    outputs = _loss_layouts(op, known, context) or output_layouts(
        context.graph, op, known, context.tp
    )
    if outputs is None:
        return None
    return {**layouts, **dict(zip(op.outputs, outputs, strict=True))}


def _loss_layouts(
    op: OpNode, known: Sequence[Layout | None], context: UnitContext
) -> tuple[Layout, ...] | None:
    """Softmax and negative log-likelihood over a split vocabulary (torch's loss_parallel)."""
    layout = known[0]
    shape = context.graph.values[op.inputs[0]].shape
    if op.name not in _LOSS_OPS or layout is None or not layout.is_shard:
        return None
    last = len(shape) - 1
    if layout.dim != last or layout.outer != 1:
        return None
    if op.name == "_log_softmax" and op.arguments[1] not in (-1, last):
        return None
    return (layout,) if op.name == "_log_softmax" else (REPLICATE,) * len(op.outputs)


def _all_replicated(layouts: Mapping[int, Layout | None]) -> bool:
    return all(layout is None or not layout.is_shard for layout in layouts.values())


def _strategy(
    node: Node, layouts: Mapping[int, Layout | None], context: UnitContext
) -> NodeStrategy:
    graph = context.graph
    known = {value: layout for value, layout in layouts.items() if layout is not None}
    loss_rows = 0
    for op_id in node.ops:
        op = graph.nodes[op_id]
        layout = known.get(op.inputs[0]) if op.inputs else None
        if op.name == "_log_softmax" and layout is not None and layout.is_shard:
            shape = graph.values[op.inputs[0]].shape
            if layout.dim == len(shape) - 1:
                loss_rows += _rows(shape)
    return NodeStrategy(
        style="region",
        inputs={value: known[value] for value in node.inputs},
        outputs={value: known.get(value, REPLICATE) for value in node.outputs},
        layouts=known,
        loss_rows=loss_rows,
    )


def _rows(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape[:-1]:
        count *= size
    return count
