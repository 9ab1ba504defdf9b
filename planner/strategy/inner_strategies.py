"""Modules of several products on weights of their own, as those of experts are.

What Megatron-LM does to an MLP in two modules (Shoeybi et al. 2019, 1909.08053, section 3), inside
one: its inputs are whole, with gradients that are sums over ranks; the weights of its first
products are split over their outputs, those of the last over their inputs, and its output is a sum
over ranks. Which dims these are follows op by op from the rules, so that it holds for any number of
weights however they are stored.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from planner.graph.operator_graph import OpNode, Parameter
from planner.runtime.layout import (
    PARTIAL,
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    Layout,
    can_shard,
    shard,
)
from planner.runtime.op_call import Call, Operand
from planner.runtime.product_rules import PRODUCTS, product_layouts, sum_layouts
from planner.strategy.module_strategies import MAX_FUSED, SPLITS, strategy
from planner.strategy.nodes import Node, NodeStrategy
from planner.strategy.propagation import output_layouts
from planner.strategy.sharding import SplitParameter
from planner.strategy.unit_context import UnitContext, exits, fits
from planner.vocabulary import Style

_MOST_STATES = 256
"""Assignments followed at a time."""

_ADDITIONS = frozenset({"add", "add_"})
_FACTORS = frozenset({"mul", "div"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """Layouts so far."""

    layouts: Mapping[int, Layout | None] = field(default_factory=dict)
    """By value; None for what is whole, with a gradient that is summed over ranks at the edge."""
    parameters: Mapping[str, Layout] = field(default_factory=dict)
    """By name, as it is stored; REPLICATE for those that one rank adds to a sum."""


def inner_strategies(node: Node, context: UnitContext) -> list[NodeStrategy]:
    """Enumerate the splits of a module's weights that leave its one output as a sum over ranks.

    Every parameter is split, or added to a sum.
    """
    own = context.graph.parameters_of(node.module)
    if len(node.outputs) != 1 or not any(len(each.shape) > 1 for each in own.values()):
        return []
    (output,) = node.outputs
    states = [_State()]
    for op in _read_ops(node, context):
        for value in op.inputs:
            states = [new for state in states for new in _branch(state, value, own, node, context)]
            if len(states) > _MOST_STATES:  # an op that reads a dozen weights, as recurrent ones do
                return []
        states = [new for state in states if (new := _run(op, state, context)) is not None]
    found = []
    for state in states:
        if state.layouts.get(output) != PARTIAL or set(state.parameters) != set(own):
            continue
        split = tuple(
            SplitParameter(name=name, dim=layout.dim, fused=layout.outer)
            for name, layout in state.parameters.items()
            if layout.is_shard
        )
        inputs = {
            value: REPLICATE_PARTIAL_GRAD
            if context.graph.values[value].requires_grad
            else REPLICATE
            for value in node.inputs
        }
        layouts = _all_layouts(node, state, context)
        found += [
            strategy(node, Style.INNER, layouts, inputs, outputs={output: leaving}, split=split)
            for leaving in exits(output, PARTIAL, context)
            if fits(output, leaving, context)
        ]
    return found


def _read_ops(node: Node, context: UnitContext) -> list[OpNode]:
    """Ops on whose results the module's output depends.

    What is read by nobody need not run: weights of attention that are averaged over heads for a
    caller that takes no more than the output.
    """
    needed, found = set(node.outputs), []
    for op in reversed([context.graph.nodes[op_id] for op_id in node.ops]):
        if not needed.isdisjoint(op.outputs):
            needed |= set(op.inputs)
            found.append(op)
    return found[::-1]


def _all_layouts(node: Node, state: _State, context: UnitContext) -> dict[int, Layout]:
    """Layouts of all values, those that nobody reads included."""
    ops = (context.graph.nodes[op_id] for op_id in node.ops)
    every = dict.fromkeys(value for op in ops for value in (*op.inputs, *op.outputs))
    return {value: state.layouts.get(value) or REPLICATE for value in every}


def _branch(
    state: _State, value: int, own: Mapping[str, Parameter], node: Node, context: UnitContext
) -> Iterator[_State]:
    """Try all layouts of a parameter where it is read for the first time."""
    graph = context.graph
    if value in state.layouts or not context.is_parameter(value):
        yield state
        return
    storage, shape = graph.values[value].storage, graph.values[value].shape
    name = next((name for name, each in own.items() if each.storage == storage), None)
    if name is None or own[name].shape != shape:
        return  # of another module, or read through a view that was made elsewhere
    if name in state.parameters:
        options = [state.parameters[name]]
    else:
        counts = _fused_counts(node, context)
        shards = (shard(dim, count) for dim in range(len(shape)) for count in counts)
        options = [REPLICATE, *(each for each in shards if can_shard(shape, each, context.ranks))]
    for layout in options:
        yield _State(
            layouts={**state.layouts, value: layout},
            parameters={**state.parameters, name: layout},
        )


def _fused_counts(node: Node, context: UnitContext) -> list[int]:
    """How many equal pieces the module takes anything apart into."""
    counts = {1}
    for op in (context.graph.nodes[op_id] for op_id in node.ops):
        if not op.inputs:
            continue
        whole, piece = (context.graph.values[v].shape for v in (op.inputs[0], op.outputs[0]))
        if op.name in SPLITS:
            if len(whole) == len(piece) and piece[-1] and whole[-1] % piece[-1] == 0:
                counts.add(whole[-1] // piece[-1])
        elif op.is_view and len(piece) == len(whole) + 1 and whole[-1] == piece[-2] * piece[-1]:
            counts.add(piece[-2])
    return sorted(count for count in counts if count <= MAX_FUSED)


def _run(op: OpNode, state: _State, context: UnitContext) -> _State | None:
    """Add the layouts of an op's outputs, None where it cannot run so."""
    known = [state.layouts.get(value) for value in op.inputs]
    found = _output_layouts(op, known, context)
    if found is None:
        return None
    layouts = {**dict.fromkeys(op.inputs), **state.layouts}
    return _State(
        layouts=layouts | dict(zip(op.outputs, found, strict=True)), parameters=state.parameters
    )


def _output_layouts(
    op: OpNode, known: Sequence[Layout | None], context: UnitContext
) -> Sequence[Layout | None] | None:
    graph = context.graph
    if REPLICATE in known:
        return _with_whole_parameter(op, known, context)
    call = _call(op, known, context)
    if PARTIAL in known:
        # What is added to a sum by one rank has a whole gradient on each: no part to sum up.
        added = () if op.name in _FACTORS else zip(op.inputs, known, strict=True)
        if any(each is None and graph.values[value].requires_grad for value, each in added):
            return None
        return sum_layouts(call)
    if op.name not in PRODUCTS or not any(known):
        return output_layouts(graph, op, known, context.ranks)
    found, parts = product_layouts(call, context.ranks)
    if found is None or _takes_parts(op, known, parts, context):
        return None
    if not all(
        can_shard(shape, layout, context.ranks)
        for shape, layout in zip(call.targets, found, strict=True)
    ):
        return None
    return found


def _takes_parts(
    op: OpNode,
    known: Sequence[Layout | None],
    parts: Sequence[Layout | None],
    context: UnitContext,
) -> bool:
    """Whether ranks take parts of a whole operand that needs a gradient.

    Its gradient comes in parts then, not as a sum over ranks. A row split is priced for that.
    """
    return any(
        layout is None and part is not None and context.graph.values[value].requires_grad
        for value, layout, part in zip(op.inputs, known, parts, strict=True)
    )


def _call(op: OpNode, known: Sequence[Layout | None], context: UnitContext) -> Call:
    shapes = context.graph.values
    operands = [
        Operand(shapes[value].shape, layout) for value, layout in zip(op.inputs, known, strict=True)
    ]
    return Call(op, operands, [shapes[value].shape for value in op.outputs])


def _with_whole_parameter(
    op: OpNode, known: Sequence[Layout | None], context: UnitContext
) -> Sequence[Layout | None] | None:
    """A whole parameter may be viewed, and added to a sum: its gradient is whole on each rank."""
    if op.is_view and known == [REPLICATE]:
        return [REPLICATE] * len(op.outputs)
    if op.name in _ADDITIONS:
        return [PARTIAL] if known == [PARTIAL, REPLICATE] else None
    if op.name not in PRODUCTS or known[0] != REPLICATE or REPLICATE in known[1:]:
        return None
    found, _ = product_layouts(_call(op, [None, *known[1:]], context), context.ranks)
    return found if list(found or ()) == [PARTIAL] else None
