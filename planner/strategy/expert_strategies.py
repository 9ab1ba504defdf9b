"""Modules of experts, of which each rank of ep runs its own on the tokens of all.

Lepikhin et al. 2021 (2006.16668): tokens go to the ranks of their experts and come back. Such a
module takes rows of features, the experts that each row goes to and their weights, and holds the
weights of all experts side by side.

Ranks of tp have the same rows, of which each sends a part; ranks of cp have parts of the same
samples. They are among the ranks that share experts, so that no expert is split and no row is
computed twice.
"""

from dataclasses import dataclass, replace

from planner.graph.operator_graph import OperatorGraph, OpNode, TensorValue
from planner.runtime.layout import REPLICATE, shard
from planner.runtime.product_rules import PRODUCTS
from planner.strategy.module_strategies import strategy
from planner.strategy.nodes import Node, NodeStrategy, RoutedRows
from planner.strategy.sharding import SplitParameter
from planner.strategy.unit_context import UnitContext, fits
from planner.units import DTYPE_BYTES
from planner.vocabulary import Axis, Style

_SELECTIONS = frozenset({"_grouped_mm", "index"})
"""Ops that take the weights of some experts out of those of all."""

_ADDITIONS = frozenset({"index_add", "index_add_", "scatter_add", "scatter_add_"})
"""Ops that add up what comes to rows."""

_MOVES = frozenset({"_to_copy", "clone", "index", "index_select", "gather"})
"""Ops that leave numbers as they are."""

_BY_ROW = _MOVES | {
    *("repeat_interleave", "index_put", "index_put_"),
    *("native_layer_norm", "rms_norm", "_fused_rms_norm"),
    *("zeros_like", "empty_like", "new_zeros", "new_empty", "_unsafe_view", "copy_"),
}
"""Ops that make of each row what they make of it alone, pointwise ones and products apart."""

_COUNT_BYTES = DTYPE_BYTES["int64"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """What tells of a module that it is one of experts."""

    number: int
    """How many it has."""
    parameters: tuple[str, ...]
    """Names of its parameters, each with the experts along its first dim."""
    rows_bytes: int
    """The rows, each as often as it has experts."""
    experts_of_row: int
    """How many that is."""
    weights_bytes: int
    """Their weights in the sum."""
    has_trained_weights: bool
    """Whether these have a gradient."""

    def routed(self, weights: frozenset[int], context: UnitContext) -> RoutedRows:
        """What a rank sends and gets back.

        Args:
            weights: Values that are weights of experts.
            context: The ranks.
        """
        readers = 1 if context.axis is Axis.EP else context.ranks
        return RoutedRows(
            ranks=context.experts,
            readers=readers,
            weights=weights,
            counts_bytes=self.number * _COUNT_BYTES,
            rows_bytes=self.rows_bytes // readers,
            experts_of_row=self.experts_of_row,
            weights_bytes=self.weights_bytes // readers,
            has_trained_weights=self.has_trained_weights,
        )


def experts_of(node: Node, graph: OperatorGraph) -> Experts | None:
    """Tell whether a module is one of experts.

    It reads (rows, features), integers of (rows, experts of each) and numbers of that shape, and
    returns (rows, features), what its experts make of each row, added up; the first dim of all its
    parameters is the experts, and they are read by expert.

    Args:
        node: A module.
        graph: Its graph.
    """
    own = graph.parameters_of(node.module)
    sizes = {each.shape[0] if len(each.shape) > 1 else 1 for each in own.values()}
    if len(node.inputs) != 3 or len(node.outputs) != 1 or len(sizes) != 1 or sizes == {1}:
        return None
    chosen, weights, rows = _roles(node, graph)
    if chosen is None or weights is None or rows is None:
        return None
    if not _reads_by_expert(node, graph, chosen) or not _adds_up(node, graph, chosen):
        return None
    (number,) = sizes
    return Experts(
        number=number,
        parameters=tuple(own),
        rows_bytes=rows.size_bytes * chosen.shape[1],
        experts_of_row=chosen.shape[1],
        weights_bytes=weights.size_bytes,
        has_trained_weights=weights.requires_grad,
    )


def _roles(
    node: Node, graph: OperatorGraph
) -> tuple[TensorValue | None, TensorValue | None, TensorValue | None]:
    """The experts of each row, their weights, and the rows, among what a module reads."""
    values = [graph.values[value] for value in node.inputs]
    target = graph.values[node.outputs[0]].shape
    integers = [each for each in values if each.dtype.startswith("int")]
    numbers = [each for each in values if _is_number(each)]
    chosen = integers[0] if len(integers) == 1 and len(integers[0].shape) == 2 else None
    if chosen is None or len(target) != 2:
        return None, None, None
    rows = next((each for each in numbers if each.shape == target), None)
    weights = next((each for each in numbers if each.shape == chosen.shape and each != rows), None)
    return chosen, weights, rows


def _reads_by_expert(node: Node, graph: OperatorGraph, chosen: TensorValue) -> bool:
    """Whether all that reads a parameter takes those of a row's own experts, views apart."""
    own = {parameter.storage for parameter in graph.parameters_of(node.module).values()}
    told = {chosen.id}
    for op in (graph.nodes[op_id] for op_id in node.ops):
        reads_own = any(graph.values[value].storage in own for value in op.inputs)
        by_expert = op.name in _SELECTIONS and not told.isdisjoint(op.inputs)
        if reads_own and not (op.is_view or by_expert):
            return False
        if not told.isdisjoint(op.inputs):
            told.update(op.outputs)
    return True


def _adds_up(node: Node, graph: OperatorGraph, chosen: TensorValue) -> bool:
    """Whether what comes of a row is the sum of what its experts make of it, each by itself.

    Each op works on rows alone, but for sums over the experts of a row, behind which nothing is
    computed. A softmax over the weights of a row, say, would need those of all its experts.
    """
    summed: set[int] = set()
    weights = {parameter.storage for parameter in graph.parameters_of(node.module).values()}
    for op in (graph.nodes[op_id] for op_id in node.ops):
        storages = {graph.values[value].storage for value in op.inputs}
        if not storages.isdisjoint(weights) and op.name in _MOVES:
            weights.update(graph.values[value].storage for value in op.outputs)
        elif not any(_is_number(graph.values[value]) for value in op.inputs):
            continue
        elif _may_add(op, graph, chosen) or not summed.isdisjoint(op.inputs):
            if not (op.is_view or op.name in _MOVES or _may_add(op, graph, chosen)):
                return False
            summed.update(op.outputs)
        elif op.name in PRODUCTS:
            if storages.isdisjoint(weights):
                return False
        elif not (op.is_view or op.is_pointwise or op.name in _BY_ROW):
            return False
    return True


def _may_add(op: OpNode, graph: OperatorGraph, chosen: TensorValue) -> bool:
    """Whether an op adds up over the experts of a row."""
    if op.name in ("index_put", "index_put_"):
        return op.arguments[-1] is True
    return op.name in _ADDITIONS or _sums_experts(op, graph, chosen.shape[1])


def _sums_experts(op: OpNode, graph: OperatorGraph, top: int) -> bool:
    """Whether a sum is over the middle of (rows, experts of each, features)."""
    if op.name != "sum":
        return False
    shape, dims = graph.values[op.inputs[0]].shape, op.arguments[1]
    return len(shape) == 3 and shape[1] == top and dims in ([1], (1,), [-2], (-2,))


def _is_number(value: TensorValue) -> bool:
    return value.dtype.startswith(("float", "bfloat"))


def expert_strategies(node: Node, context: UnitContext) -> tuple[NodeStrategy, ...] | None:
    """Give the ways to run a module of experts that ranks share, None for other modules.

    Each rank of tp and cp takes its part of the rows, as the stream lies, and what comes of it
    stays so or is gathered. There is no way where the rows, or the experts, do not divide.
    """
    graph = context.graph
    experts = experts_of(node, graph)
    if experts is None:
        return None
    part = REPLICATE if context.axis is Axis.EP else shard(0, context.before)
    if experts.number % context.experts or not all(fits(v, part, context) for v in node.inputs):
        return ()
    values = {
        value for op in node.ops for value in (*graph.nodes[op].inputs, *graph.nodes[op].outputs)
    }
    weights = frozenset(filter(context.is_parameter, values))
    layouts = {value: shard(0) if value in weights else part for value in sorted(values)}
    split = tuple(SplitParameter(name=name, dim=0) for name in experts.parameters)
    (output,) = node.outputs
    ways = [
        strategy(
            node, Style.EXPERTS, layouts, dict.fromkeys(node.inputs, part),
            outputs={output: leaving}, split=split,
        )
        for leaving in dict.fromkeys((part, REPLICATE))
    ]  # fmt: skip
    return tuple(replace(way, routed=experts.routed(weights, context)) for way in ways)
