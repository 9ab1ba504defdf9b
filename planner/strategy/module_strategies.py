"""The ways in which a module that owns parameters can run over the tp axis."""

from dataclasses import replace
from math import prod

from planner.graph.operator_graph import OpNode
from planner.runtime.layout import (
    PARTIAL,
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    Layout,
    can_shard,
    shard,
)
from planner.strategy.nodes import Node, NodeStrategy
from planner.strategy.propagation import output_layouts
from planner.strategy.sharding import SplitParameter
from planner.strategy.unit_context import UnitContext, as_stream, exits, fits
from planner.vocabulary import Axis, Style

MAX_FUSED = 8
"""Most projections that are looked for in one weight (2: gate and up; 3: query, key, value)."""
SPLITS = frozenset({"split", "split_with_sizes", "chunk", "slice", "narrow"})


def module_strategies(node: Node, context: UnitContext) -> tuple[NodeStrategy, ...]:
    """Enumerate the strategies of a module node.

    Always "replicate"; "on_part" where the module keeps a split of its input; over tp for a linear
    module "column" and "row", for an embedding "vocab_embedding".
    """
    found = _replicated(node, context)
    for layout in _parts(node, context):
        found += _kept(node, context, layout)
    if context.axis is Axis.CP:
        return (*found, *_looked_up_on_part(node, context))
    if context.axis is Axis.EP:
        return tuple(found)
    linear = _linear_op(node, context)
    if linear is not None:
        columns, rows = _split_parameters(node, context, linear)
        found += _columns(node, context, linear, columns)
        found += [replace(each, split=_parts_of(rows)) for each in _rows(node, context, linear)]
    embedding = _embedding_op(node, context)
    if embedding is not None:
        rows = tuple((name, 0) for name in context.graph.parameters_of(node.module))
        tables = _vocabularies(node, context, embedding)
        found += [replace(each, split=_parts_of(rows)) for each in tables]
    return tuple(found)


def _parts(node: Node, context: UnitContext) -> list[Layout]:
    """Splits of a module's input: that of the stream, and of dims between samples and features.

    None over ep, where ranks have samples of their own. Over cp that of the stream where its
    samples and its sequence lie in one dim, too.
    """
    if context.axis is Axis.EP:
        return []
    if not node.inputs:
        return [context.stream] if context.stream.is_shard else []
    stream = as_stream(node.inputs[0], context)
    if len(node.inputs) != 1 or len(node.outputs) != 1:
        return [stream] if stream.is_shard else []
    ndim = len(context.graph.values[node.inputs[0]].shape)
    inner = [shard(dim) for dim in range(1, ndim - 1)] if ndim > 3 else []
    return list(dict.fromkeys([*([stream] if stream.is_shard else []), *inner]))


def _replicated(node: Node, context: UnitContext) -> list[NodeStrategy]:
    """Everything whole on every rank; a single output may leave as the stream's shard."""
    graph = context.graph
    values = {
        value for op in node.ops for value in (*graph.nodes[op].inputs, *graph.nodes[op].outputs)
    }
    layouts = dict.fromkeys(values, REPLICATE)
    inputs = dict.fromkeys(node.inputs, REPLICATE)
    leaves = exits(node.outputs[0], REPLICATE, context) if len(node.outputs) == 1 else (REPLICATE,)
    return [
        strategy(
            node, Style.REPLICATE, layouts, inputs,
            outputs=dict.fromkeys(node.outputs, leaving),
        )
        for leaving in leaves
        if all(fits(output, leaving, context) for output in node.outputs)
    ]  # fmt: skip


def _kept(node: Node, context: UnitContext, layout: Layout) -> list[NodeStrategy]:
    """Whole parameters on a split input: legal where each op keeps the shard by itself.

    The gradients of the module's parameters are sums over ranks, and are summed afterwards.
    Over tp only for modules of vectors (norms, scales, biases) and of small matrices: large ones
    on every rank would make tensor parallelism a data parallelism whose memory the unit's price
    does not show.
    """
    graph = context.graph
    if context.axis is Axis.TP and any(
        context.is_parameter(value)
        and len(graph.values[value].shape) > 1
        and prod(graph.values[value].shape) >= context.least_split
        for op in node.ops
        for value in graph.nodes[op].inputs
    ):
        return []
    layouts: dict[int, Layout | None] = {}
    for value in node.inputs:
        if len(graph.values[value].shape) <= layout.dim:
            return []
        if not can_shard(graph.values[value].shape, layout, context.ranks):
            return []
        layouts[value] = layout
    for op_id in node.ops:
        op = graph.nodes[op_id]
        known = [layouts.get(value) for value in op.inputs]
        outputs = output_layouts(graph, op, known, context.ranks)
        if outputs is None:
            return []
        layouts.update(dict.fromkeys(op.inputs) | layouts)
        layouts.update(zip(op.outputs, outputs, strict=True))
    if any(layouts[value] != layout for value in node.outputs):
        return []
    whole = {value: found or REPLICATE for value, found in layouts.items()}
    # Over tp what runs on a part lies between splits; over cp what follows may need all of it. Of
    # several outputs the script changes the layout of the first alone.
    may_gather = context.axis is Axis.CP and len(node.outputs) == 1
    leaves = exits(node.outputs[0], layout, context) if may_gather else (layout,)
    return [
        strategy(
            node, Style.ON_PART, whole, dict.fromkeys(node.inputs, layout),
            outputs=dict.fromkeys(node.outputs, leaving),
        )
        for leaving in leaves
    ]  # fmt: skip


def strategy(
    node: Node,
    style: str,
    layouts: dict[int, Layout],
    inputs: dict[int, Layout],
    *,
    outputs: dict[int, Layout] | None = None,
    split: tuple[SplitParameter, ...] = (),
) -> NodeStrategy:
    """Make a strategy; values that leave as they lie inside need no ``outputs``."""
    return NodeStrategy(
        style=style,
        inputs=inputs,
        outputs=outputs or {value: layouts[value] for value in node.outputs},
        layouts=layouts,
        split=split,
    )


def _linear_weight(op: OpNode, context: UnitContext) -> int | None:
    """The weight value (in, out) of a matmul x @ w with w a transposed parameter."""
    if op.name not in ("mm", "addmm"):
        return None
    weight = op.inputs[-1]
    return weight if context.is_parameter(weight) else None


def _linear_op(node: Node, context: UnitContext) -> OpNode | None:
    """The matmul of an nn.Linear-like module, None where the module is something else.

    The module must do nothing but reshape, multiply and add a bias. Of an input whose rows do not
    follow one another (``stream[:, :-1]``) it makes a copy before.
    """
    graph = context.graph
    if len(node.inputs) != 1 or len(node.outputs) != 1:
        return None
    work = [graph.nodes[op] for op in node.ops if not graph.nodes[op].is_view]
    matmuls = [op for op in work if _linear_weight(op, context) is not None]
    others = [op for op in work if op not in matmuls and op.name != "_unsafe_view"]
    if len(matmuls) != 1:
        return None
    (linear,) = matmuls
    if any(op.name not in (("clone",) if op.id < linear.id else ("add", "add_")) for op in others):
        return None
    return linear if _weight_name(node, context, linear) is not None else None


def _weight_name(node: Node, context: UnitContext, linear: OpNode) -> str | None:
    """Name of the weight, None where it is read through more than a transposition."""
    weight = context.graph.values[linear.inputs[-1]]
    for name, parameter in context.graph.parameters_of(node.module).items():
        if parameter.storage == weight.storage and set(parameter.shape) == set(weight.shape):
            return name
    return None


def _stored_dims(node: Node, context: UnitContext, linear: OpNode) -> tuple[int, int]:
    """Dims of the weight, as it is stored, that are its input and its output features.

    nn.Linear stores (out, in) and reads it transposed, GPT-2's Conv1D (in, out).
    """
    transposes = (context.graph.nodes[op] for op in node.ops)
    is_transposed = any(
        op.name in ("t", "transpose", "permute") and linear.inputs[-1] in op.outputs
        for op in transposes
    )
    return (1, 0) if is_transposed else (0, 1)


_Split = tuple[tuple[str, int], ...]


def _split_parameters(node: Node, context: UnitContext, linear: OpNode) -> tuple[_Split, _Split]:
    """What a linear module splits, by columns and by rows: parameters with the dim of each."""
    weight = _weight_name(node, context, linear)
    assert weight is not None
    rows, columns = _stored_dims(node, context, linear)
    own = context.graph.parameters_of(node.module).items()
    biases = [(name, 0) for name, each in own if name != weight and len(each.shape) == 1]
    return ((weight, columns), *biases), ((weight, rows),)


def _looked_up_on_part(node: Node, context: UnitContext) -> list[NodeStrategy]:
    """A whole table, of which each rank looks up its part of the sequence.

    The indices depend on no parameter, and are whole on each rank. Along one of their dims they
    are as long as the stream is along its own.
    """
    graph = context.graph
    embedding = _embedding_op(node, context)
    if embedding is None or embedding.inputs[1] not in context.constants:
        return []
    (output,), indices = node.outputs, embedding.inputs[1]
    found = []
    for dim, size in enumerate(graph.values[indices].shape):
        if size == context.sequence and output in embedding.outputs:
            layouts = dict.fromkeys((indices, output), shard(dim))
            way = strategy(node, Style.ON_PART, layouts, {})
            found.append(replace(way, constant_input=shard(dim)))
    return found


def _parts_of(split: _Split, fused: int = 1) -> tuple[SplitParameter, ...]:
    return tuple(SplitParameter(name=name, dim=dim, fused=fused) for name, dim in split)


def _columns(node: Node, context: UnitContext, linear: OpNode, split: _Split) -> list[NodeStrategy]:
    """Weight split over output features (Shoeybi et al. 2019, 1909.08053, section 3).

    No communication forward, an all-reduce of the input's gradient backward. Where the stream is
    split, an output that leaves whole would be taken for a part of it by the module that reads it.
    """
    graph = context.graph
    features = graph.values[linear.outputs[0]].shape[-1]
    unsplit = _unsplit(node, context, linear)
    found = []
    for fused in sorted(_fused_counts(node, context, features)):
        if features % fused or (features // fused) % context.ranks:
            continue
        layouts: dict[int, Layout] = {}
        for op_id in node.ops:
            op = graph.nodes[op_id]
            for value in op.inputs:
                layouts.setdefault(value, REPLICATE)
            for value in op.outputs:
                rank = len(graph.values[value].shape)
                is_split = value not in unsplit
                layouts[value] = shard(rank - 1, fused) if is_split else REPLICATE
        for value in filter(context.is_parameter, linear.inputs):
            layouts[value] = shard(len(graph.values[value].shape) - 1, fused)
        inputs = {node.inputs[0]: REPLICATE_PARTIAL_GRAD}
        (output,) = node.outputs
        for leaving in exits(output, layouts[output], context):
            if leaving == REPLICATE and (fused > 1 or context.stream.is_shard):
                continue
            way = strategy(node, Style.COLUMN, layouts, inputs, outputs={output: leaving})
            found.append(replace(way, split=_parts_of(split, fused)))
    return found


def _fused_counts(node: Node, context: UnitContext, features: int) -> set[int]:
    """How many equal projections the readers of a linear module may take its output apart into."""
    graph = context.graph
    (output,) = node.outputs
    ndim = len(graph.values[output].shape)
    counts = {1}
    for op_id in context.readers.get(output, ()):
        op = graph.nodes[op_id]
        target = graph.values[op.outputs[0]].shape
        if op.name in SPLITS and len(target) == ndim and features % target[-1] == 0:
            counts.add(features // target[-1])
        elif op.is_view and len(target) > ndim:
            counts.add(target[ndim - 1])
    return {count for count in counts if count <= MAX_FUSED}


def _unsplit(node: Node, context: UnitContext, linear: OpNode) -> set[int]:
    """Values of a linear module that lie before its matmul (views of its input)."""
    graph = context.graph
    before: set[int] = set(node.inputs)
    for op_id in node.ops:
        op = graph.nodes[op_id]
        if op.id < linear.id and any(value in before for value in op.inputs):
            before.update(op.outputs)
    return before


def _rows(node: Node, context: UnitContext, linear: OpNode) -> list[NodeStrategy]:
    """Weight split over input features: the input comes split, the output is a sum over ranks."""
    graph = context.graph
    features = graph.values[linear.inputs[-1]].shape[0]
    if features % context.ranks:
        return []
    before = _unsplit(node, context, linear)
    layouts: dict[int, Layout] = {}
    for op_id in node.ops:
        op = graph.nodes[op_id]
        for value in (*op.inputs, *op.outputs):
            rank = len(graph.values[value].shape)
            if value in before:
                layouts[value] = shard(rank - 1)
            elif not context.is_parameter(value):
                layouts[value] = PARTIAL
            else:
                layouts[value] = REPLICATE
    layouts[linear.inputs[-1]] = shard(0)
    inputs = {node.inputs[0]: layouts[node.inputs[0]]}
    (output,) = node.outputs
    return [
        strategy(node, Style.ROW, layouts, inputs, outputs={output: leaving})
        for leaving in exits(output, PARTIAL, context)
        if fits(output, leaving, context)
    ]


def _embedding_op(node: Node, context: UnitContext) -> OpNode | None:
    """The gather of an nn.Embedding-like module."""
    graph = context.graph
    work = [graph.nodes[op] for op in node.ops if not graph.nodes[op].is_view]
    if len(work) != 1 or work[0].name != "embedding" or len(node.outputs) != 1:
        return None
    return work[0] if context.is_parameter(work[0].inputs[0]) else None


def _vocabularies(node: Node, context: UnitContext, embedding: OpNode) -> list[NodeStrategy]:
    """Rows of the table split: each rank looks up the tokens it has, the rest are zero."""
    graph = context.graph
    if graph.values[embedding.inputs[0]].shape[0] % context.ranks:
        return []
    layouts: dict[int, Layout] = {}
    for op_id in node.ops:
        op = graph.nodes[op_id]
        for value in op.inputs:
            layouts.setdefault(value, REPLICATE)
        layouts.update(dict.fromkeys(op.outputs, PARTIAL))
    layouts[embedding.inputs[0]] = shard(0)
    (output,) = node.outputs
    return [
        strategy(node, Style.VOCAB_EMBEDDING, layouts, {}, outputs={output: leaving})
        for leaving in exits(output, PARTIAL, context)
        if fits(output, leaving, context)
    ]
