"""The layouts in which a region of glue can run without communication inside."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from planner.graph.operator_graph import OperatorGraph, OpNode
from planner.runtime.layout import PARTIAL, REPLICATE, Layout, can_shard, shard
from planner.runtime.op_call import Call, Operand
from planner.runtime.op_rules import ATTENTIONS, head_copies
from planner.runtime.product_rules import sum_layouts
from planner.strategy.nodes import Node, NodeKind, NodeStrategy, RowSum
from planner.strategy.propagation import output_layouts
from planner.strategy.unit_context import UnitContext
from planner.units import DTYPE_BYTES
from planner.vocabulary import Axis

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
    *_, (_, _, partial) = _assignments(node, context, candidates)
    return tuple(_strategy(node, layouts, context) for layouts in partial)


def obstacle_of(
    node: Node, context: UnitContext, candidates: Mapping[int, Sequence[Layout]]
) -> str:
    """Name the op of a node without strategies that stops it.

    Of a region the first that runs in none of the layouts of what it reads.
    """
    op, layouts = context.graph.nodes[node.ops[-1]], _Assignment()
    if node.kind is NodeKind.REGION:
        for each, before, after in _assignments(node, context, candidates):
            if not after:
                op = each
                layouts = max(before, key=lambda known: not _all_replicated(known), default={})
                break
    return f"no rule says how {_op_words(op, context, layouts)} runs on parts"


_Assignment = dict[int, Layout | None]


def _op_words(op: OpNode, context: UnitContext, layouts: _Assignment) -> str:
    """Name an op, what it reads, and where it stands."""
    shapes = [
        f"{context.graph.values[value].shape}{' whole' if layouts.get(value) == REPLICATE else ''}"
        for value in op.inputs
    ]
    where = f" in {op.module}" if op.module else ""
    return f"{op.name} of {', '.join(shapes)}{where}"


def _assignments(
    node: Node, context: UnitContext, candidates: Mapping[int, Sequence[Layout]]
) -> Iterator[tuple[OpNode, list[_Assignment], list[_Assignment]]]:
    """Each op of a region, the layouts that it may read, and those under which it runs too."""
    partial: list[_Assignment] = [{}]
    entering = set(node.inputs)
    for op_id in node.ops:
        op = context.graph.nodes[op_id]
        for value in op.inputs:
            if value in entering:
                # A value that its module cannot give in any allowed layout has no candidates.
                partial = _branch(partial, value, candidates.get(value, ()), context)
        before = partial
        partial = [*_run(op, before, context)]
        if len(partial) > MAX_STRATEGIES:
            partial = [layouts for layouts in partial if _all_replicated(layouts)]
        yield op, before, partial


def _branch(
    partial: list[_Assignment],
    value: int,
    candidates: Sequence[Layout],
    context: UnitContext,
) -> list[_Assignment]:
    """Extend each assignment by each layout of a value that is still open."""
    shape = context.graph.values[value].shape
    legal = [
        layout
        for layout in candidates
        if not layout.is_shard
        or (layout.dim < len(shape) and can_shard(shape, layout, context.ranks))
    ]
    extended = []
    for layouts in partial:
        if value in layouts:
            extended.append(layouts)
        else:
            extended += [{**layouts, value: layout} for layout in legal]
    return extended


def _run(op: OpNode, partial: Sequence[_Assignment], context: UnitContext) -> Iterator[_Assignment]:
    """Add the layouts of an op's outputs to those assignments on which it can run."""
    is_parameter = [context.is_parameter(value) for value in op.inputs]
    given = list(zip(op.inputs, is_parameter, strict=True))
    found: dict[tuple[Layout | None, ...], Sequence[Layout | None] | None] = {}
    for layouts in partial:
        known = tuple([REPLICATE if whole else layouts.get(value) for value, whole in given])
        if known not in found:  # most assignments differ in what the op does not read
            found[known] = _outputs(op, known, context)
        outputs = found[known]
        if outputs is not None:
            yield {**layouts, **dict(zip(op.outputs, outputs, strict=True))}


def _outputs(
    op: OpNode, known: Sequence[Layout | None], context: UnitContext
) -> Sequence[Layout | None] | None:
    """Layouts of an op's outputs, None where it cannot run on its inputs."""
    return (
        _loss_layouts(op, known, context)
        or _attention_layouts(op, known, context)
        or output_layouts(context.graph, op, known, context.ranks)
    )


def _loss_layouts(
    op: OpNode, known: Sequence[Layout | None], context: UnitContext
) -> tuple[Layout, ...] | None:
    """Softmax and negative log-likelihood over a split vocabulary (torch's loss_parallel).

    Where rows are split the loss is a sum over ranks: their number, and the weight of each, are
    known from the targets, which each rank has. What scales such a sum leaves one.
    """
    values = context.graph.values
    if PARTIAL in known:
        operands = [
            Operand(values[value].shape, None if layout == REPLICATE else layout)
            for value, layout in zip(op.inputs, known, strict=True)
        ]
        found = sum_layouts(Call(op, operands, [values[value].shape for value in op.outputs]))
        return None if found is None else tuple(found)
    layout = known[0]
    shape = values[op.inputs[0]].shape
    if op.name not in _LOSS_OPS or layout is None or not layout.is_shard:
        return None
    last = len(shape) - 1
    if layout.dim == 0 and last == 1 and op.name == "nll_loss_forward" and _reduces(op):
        return (PARTIAL, REPLICATE) if known[1] is None else None
    if layout.dim != last or layout.outer != 1:
        return None
    if op.name == "_log_softmax" and op.arguments[1] not in (-1, last):
        return None
    return (layout,) if op.name == "_log_softmax" else (REPLICATE,) * len(op.outputs)


def _reduces(op: OpNode) -> bool:
    """Whether a loss is one number: the mean or the sum over rows."""
    return op.arguments[3] != 0


HEADS = 1
"""Dim of queries, keys and values that is their heads."""
TOKENS = 2
"""Dim of queries, keys and values that is the sequence: (batch, heads, tokens, head_dim)."""


def _attention_layouts(
    op: OpNode, known: Sequence[Layout | None], context: UnitContext
) -> tuple[Layout, ...] | None:
    """Attention over tokens that cp splits: each rank attends to all of them for its heads.

    Queries, keys and values change from a part of the tokens of all heads to all tokens of a part
    of the heads, and the output changes back (Jacobs et al. 2023, 2309.14509): masks stay as they
    are, and causal ones leave all ranks the same work. Over tp projections split the heads.
    """
    layout = shard(TOKENS)
    if context.axis is not Axis.CP or op.name not in ATTENTIONS:
        return None
    if any(each != layout for each in known[:3]):
        return None
    shapes = [context.graph.values[value].shape for value in (*op.inputs, *op.outputs)]
    operands = len(op.inputs)
    if any(len(shape) != 4 for shape in shapes[:3]) or shapes[0][1] % context.ranks:
        return None
    if any(each is not None for each in known[3:operands]):
        return None
    return tuple(layout if len(shape) > TOKENS else REPLICATE for shape in shapes[operands:])


def exchanged(node: Node, strategy: NodeStrategy, context: UnitContext) -> dict[int, int]:
    """Values that attention of a node brings from split tokens to split heads, or back.

    With how often each head of them is sent. What attention repeats by itself, for a kernel that
    takes no groups, is sent before that.
    """
    found: dict[int, int] = {}
    graph = context.graph
    grouped: dict[int, int] = {}
    for op in (graph.nodes[op_id] for op_id in node.ops):
        if op.name == "_repeat_heads":
            grouped[op.outputs[0]] = op.inputs[0]
        if op.name in ATTENTIONS and strategy.layouts.get(op.inputs[0]) == shard(TOKENS):
            for value in (*op.inputs[:3], op.outputs[0]):
                sent = grouped.get(value, value)
                found[sent] = head_copies(graph.values[sent].shape[HEADS], context.ranks)
    return found


def _all_replicated(layouts: Mapping[int, Layout | None]) -> bool:
    return all(layout is None or not layout.is_shard for layout in layouts.values())


def _strategy(
    node: Node, layouts: Mapping[int, Layout | None], context: UnitContext
) -> NodeStrategy:
    known = {value: layout for value, layout in layouts.items() if layout is not None}
    return NodeStrategy(
        style="region",
        inputs={value: known[value] for value in node.inputs},
        outputs={value: known.get(value, REPLICATE) for value in node.outputs},
        layouts=known,
        row_sums=tuple(_row_sums(node, known, context)),
        summed_losses=tuple(_summed(node, known, context)),
    )


def _summed(node: Node, layouts: Mapping[int, Layout], context: UnitContext) -> Iterator[int]:
    """Sums over ranks that no op of a node makes another one of."""
    for value in (value for value, layout in layouts.items() if layout == PARTIAL):
        readers = (
            op for op in map(context.graph.nodes.__getitem__, node.ops) if value in op.inputs
        )
        if not any(layouts.get(made) == PARTIAL for op in readers for made in op.outputs):
            yield value


def _row_sums(node: Node, layouts: Mapping[int, Layout], context: UnitContext) -> Iterator[RowSum]:
    """All-reduces inside losses over a split vocabulary, as ``runtime.split_loss`` makes them.

    A softmax takes the maximum and the sum of each row; its backward the sum of the gradients of
    each, unless all of them come from a loss of one class per row, which knows that sum. Such a
    loss takes the log-probability of each row's class from the rank that has it.
    """
    graph = context.graph
    for op in (graph.nodes[op_id] for op_id in node.ops):
        if op.name not in _LOSS_OPS or not _over_classes(op, layouts, graph):
            continue
        *rows, _ = graph.values[op.inputs[0]].shape
        result = graph.values[op.outputs[0]]
        row_bytes = prod(rows) * DTYPE_BYTES[result.dtype]
        if op.name == "nll_loss_forward":
            yield RowSum(op=op.id, num_bytes=row_bytes, forward=1, backward=0)
            continue
        names = [graph.nodes[reader].name for reader in context.readers[op.outputs[0]]]
        backward = int(result.requires_grad and names != ["nll_loss_forward"])
        yield RowSum(op=op.id, num_bytes=row_bytes, forward=2, backward=backward)


def _over_classes(op: OpNode, layouts: Mapping[int, Layout], graph: OperatorGraph) -> bool:
    """Whether the last dim of an op's first input is split."""
    layout = layouts.get(op.inputs[0])
    last = len(graph.values[op.inputs[0]].shape) - 1
    return layout is not None and layout.is_shard and layout.dim == last
