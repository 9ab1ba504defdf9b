"""The work of one op on one rank, given the layouts of its operands."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from planner.cost.op import ROW_ALIGNMENT, OpKind, OpWork
from planner.graph.analysis.causal import masked_flop
from planner.graph.operator_graph import OperatorGraph, OpNode, Phase, StorageKind
from planner.runtime.layout import Layout, shard
from planner.runtime.op_rules import ATTENTIONS, MATMULS, head_copies
from planner.strategy.nodes import Node, NodeStrategy, RoutedRows
from planner.strategy.problem import ShardingProblem
from planner.strategy.region_strategies import HEADS
from planner.units import DTYPE_BYTES
from planner.vocabulary import Dtype

_CONVOLUTIONS = frozenset({"convolution", "convolution_backward", "_grouped_mm"})
_RECURRENT = frozenset({"_fused_rnn", "_fused_rnn_backward"})
NORMS = frozenset(
    {
        "native_layer_norm", "native_layer_norm_backward", "rms_norm", "rms_norm_backward",
        "_fused_rms_norm", "_fused_rms_norm_backward", "native_group_norm",
        "native_group_norm_backward", "native_batch_norm", "native_batch_norm_backward",
    }
)  # fmt: skip
"""Norms, forward and backward."""

_REDUCTIONS = NORMS | {
    "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data", "mean",
    "sum", "var", "_repeat_heads_backward",
}  # fmt: skip
_EMBEDDINGS = frozenset(
    {"embedding", "embedding_dense_backward", "index", "gather", "index_select", "scatter_add"}
)
_UNALIGNED_SHARE = 0.5
"""Share of the rate of matmuls whose rows are not multiples of 16 bytes: in vTrain's single-node
runs the head takes 1.6 to 2 times as long with 50,257 tokens (tp 1) as with as many of a padded
vocabulary (tp 2 and more)."""

_UNREAD = frozenset({"nll_loss_forward", "nll_loss_backward"})
"""They read one element of each row: their kernels write, or do hardly anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Share of a value's bytes that one rank holds: 1, or one of its ranks' where it is split."""

    layouts: Mapping[int, Layout] = field(default_factory=dict)
    """Layout of each value."""
    ranks: int = 1
    """Ranks of the axis."""
    copies: Mapping[int, int] = field(default_factory=dict)
    """How often ranks have a split value together, where more than once."""
    otherwise: float = 1.0
    """Share of values without a layout."""
    around: "Shares | None" = None
    """Those over what lies around it: over cp, of which tp splits a rank's part, or of chunks over
    ranks."""
    routed: RoutedRows | None = None
    """What goes to the ranks of experts: a rank computes as much less as it has fewer rows, not as
    it has fewer weights."""

    @property
    def of_work(self) -> float | None:
        """Share of an op's work, None where the shares of what it reads and makes tell it."""
        return None if self.routed is None else 1 / self.routed.readers

    @property
    def axes(self) -> tuple["Shares", ...]:
        """Those of each axis by itself."""
        return (self,) if self.around is None else (replace(self, around=None), *self.around.axes)

    def is_copied(self, value: int) -> bool:
        """Whether ranks exchange a value for attention."""
        return any(value in each.copies for each in self.axes)

    def __call__(self, value: int) -> float:
        """Return the share of a value."""
        if self.routed is not None and value in self.routed.weights:
            return 1 / self.routed.ranks
        layout = self.layouts.get(value)
        if layout is None:
            share = self.otherwise
        else:
            share = self.copies.get(value, 1) / self.ranks if layout.is_shard else 1.0
        return share if self.around is None else share * self.around(value)

    def as_of(self, value: int, other: int | None) -> float:
        """The share of a value, of another where its own layout is not known."""
        if value in self.layouts:
            return self(value)
        return 1.0 if other is None else self(other)


def shares_of(strategy: NodeStrategy, ranks: int) -> Shares:
    """Shares from the layouts of a strategy; values without a layout are whole."""
    return Shares(
        layouts=strategy.layouts, ranks=ranks, copies=strategy.exchanged, routed=strategy.routed
    )


def shares_by_op(problem: ShardingProblem, chosen: Sequence[NodeStrategy]) -> dict[int, Shares]:
    """Shares of the strategy that was chosen for the node of each forward op."""
    found: dict[int, Shares] = {}
    for node, strategy in zip(problem.folded.nodes, chosen, strict=True):
        found |= dict.fromkeys(node.ops, shares_in(problem, node, strategy))
    return found


def shares_in(problem: ShardingProblem, node: Node, strategy: NodeStrategy) -> Shares:
    """Shares of a node's strategy in its problem, over cp as over the axis of the problem."""
    own, outer = (
        shares_of(strategy, problem.context.ranks),
        context_strategy(problem, node, strategy),
    )
    if outer is None:
        return own
    assert problem.around is not None
    return replace(own, around=shares_of(outer, problem.around.ranks))


def context_strategy(
    problem: ShardingProblem, node: Node, strategy: NodeStrategy
) -> NodeStrategy | None:
    """How a node runs over cp around the axis of its problem, None where nothing is.

    Of the heads that the inner axis leaves, those of grouped queries may have to go out oftener.
    """
    if problem.around is None:
        return None
    outer, values = problem.around.chosen[node.index], problem.context.graph.values
    sent = {}
    for value in outer.exchanged:
        is_split = strategy.layouts.get(value) == shard(HEADS)
        heads = values[value].shape[HEADS] // (problem.context.ranks if is_split else 1)
        sent[value] = head_copies(heads, problem.around.ranks)
    return replace(outer, exchanged=sent, routed=None)  # what goes to experts does so once


def op_kind(name: str) -> OpKind:
    """What limits an op, by its name."""
    if name in MATMULS or name in _CONVOLUTIONS or name in _RECURRENT:
        return "matmul"
    if name in ATTENTIONS or name.removesuffix("_backward") in ATTENTIONS:
        return "attention"
    if name in _REDUCTIONS:
        return "reduction"
    return "embedding" if name in _EMBEDDINGS else "memory"


def forward_work(graph: OperatorGraph, op: OpNode, share: Shares) -> OpWork:
    """Work of a forward op on one rank.

    Args:
        graph: The op's graph.
        op: The op.
        share: Share of each value that the rank holds.
    """
    parts = [([each(v) for v in op.inputs], [each(v) for v in op.outputs]) for each in share.axes]
    return _known_work(graph, op, parts, share.of_work)


def makes_weight_gradient(graph: OperatorGraph, op: OpNode) -> bool:
    """Whether a backward op is the product that is the gradient of a parameter."""
    made = {graph.values[value].storage for value in op.outputs}
    return op.name in MATMULS and not made.isdisjoint(graph.parameter_gradients)


def unowned_work(op: OpNode, share: float) -> OpWork:
    """A share of a backward op that belongs to no forward op: sums of gradients."""
    return OpWork(
        kind="memory",
        flop=op.flop * share,
        read_bytes=op.read_bytes * share,
        write_bytes=op.write_bytes * share,
        is_split=share < 1,
    )


def backward_work(graph: OperatorGraph, op: OpNode, forward: OpNode, share: Shares) -> OpWork:
    """Work of a backward op on one rank, from the layouts of its forward op.

    Values of which a layout is known have that share, others that of ``_lies_as``.

    Args:
        graph: The op's graph.
        op: The backward op.
        forward: The forward op that it differentiates.
        share: Share of each forward value that the rank holds.
    """
    parts = [_backward_shares(graph, op, forward, each) for each in share.axes]
    return _known_work(graph, op, parts, share.of_work)


_Parts = Sequence[tuple[list[float], list[float]]]
"""Shares of what an op reads and writes, over each axis."""


def _known_work(graph: OperatorGraph, op: OpNode, parts: _Parts, fixed: float | None) -> OpWork:
    """``_work``, made once: most strategies of a unit split an op alike."""
    key: tuple[object, ...] = ("work", op.id, fixed)
    for reads, writes in parts:
        key = (*key, *reads, *writes)
    work: OpWork | None = graph.known.get(key)
    if work is None:
        work = _work(graph, op, parts, fixed=fixed)
        graph.known[key] = work
    return work


def backward_shares(
    graph: OperatorGraph, op: OpNode, forward: OpNode, share: Shares
) -> tuple[list[float], list[float]]:
    """Shares of what a backward op reads and writes; arguments as of ``backward_work``."""
    return _over_all([_backward_shares(graph, op, forward, each) for each in share.axes])


def _over_all(parts: _Parts) -> tuple[list[float], list[float]]:
    """Shares over all axes together."""
    if len(parts) == 1:
        return parts[0]
    reads, writes = zip(*parts, strict=True)
    return [prod(each) for each in zip(*reads, strict=True)], [
        prod(each) for each in zip(*writes, strict=True)
    ]


def _backward_shares(
    graph: OperatorGraph, op: OpNode, forward: OpNode, share: Shares
) -> tuple[list[float], list[float]]:
    """Those over one axis."""
    reads, writes = sources(graph, op, forward)
    return [share.as_of(*each) for each in reads], [share.as_of(*each) for each in writes]


Sources = tuple[Sequence[tuple[int, int | None]], Sequence[tuple[int, int | None]]]
"""Values, each with that as which it lies where no layout of its own is known; None for whole."""


def sources(graph: OperatorGraph, op: OpNode, forward: OpNode) -> Sources:
    """What an op reads, and what it writes; arguments as of ``backward_work``."""
    key = "sources", op.id, forward.id
    if key not in graph.wiring:
        touched = (*forward.inputs, *forward.outputs)
        graph.wiring[key] = tuple(
            [(value, _lies_as(graph, value, touched, forward)) for value in values]
            for values in (op.inputs, op.outputs)
        )
    found: Sources = graph.wiring[key]
    return found


def _lies_as(
    graph: OperatorGraph, value: int, touched: Sequence[int], forward: OpNode
) -> int | None:
    """The value as which one lies of which no layout is known, None where it is whole.

    Of a forward op what it is a view of, transposed, say; else the value whose gradient it is.
    Intermediates, and gradients of values that the forward op does not know, lie as its result.
    """
    if value in touched:
        return value
    storage = graph.storages[graph.values[value].storage]
    viewed = (each for each in touched if graph.values[each].storage == storage.id)
    target = storage.gradient_of if storage.gradient_of in touched else None
    return next((each for each in (*viewed, target, *forward.outputs) if each is not None), None)


def _work(
    graph: OperatorGraph,
    op: OpNode,
    parts: _Parts,
    *,
    fixed: float | None,
) -> OpWork:
    """Scale an op's FLOPs, bytes and matmul sizes by the shares of its operands.

    Its FLOPs by ``fixed`` where that is known.
    """
    kind = op_kind(op.name)
    input_shares, output_shares = _over_all(parts)
    part = min((*input_shares, *output_shares), default=1.0) if fixed is None else fixed
    # What looks rows up in a table reads as many, though the rank has less of the table.
    looks_up = kind == "embedding" and fixed is not None
    read = part if looks_up else _scaled(graph, op.inputs, input_shares)
    written = _scaled(graph, op.outputs, output_shares)
    batch, m, n, k = 1, 0, 0, 0
    alignment_share = 1.0
    if op.name in MATMULS and len(op.inputs) >= 2:
        batch, m, n, k = _matmul_sizes(graph, op, [reads for reads, _ in parts])
        alignment_share = _alignment_share(graph, op, m, n, k)
    elif op.name in _RECURRENT:
        m, n, k = _recurrent_sizes(graph, op)
    elif kind == "attention":
        batch, m, n, k = _attention_sizes(graph, op, part)
    return OpWork(
        name=op.name,
        kind=kind,
        flop=op.flop * part,
        masked_flop=masked_flop(graph, op) * part,
        read_bytes=0.0 if op.name in _UNREAD else op.read_bytes * read,
        write_bytes=op.write_bytes * written,
        batch=batch,
        m=m,
        n=n,
        k=k,
        backward=op.phase is Phase.BACKWARD,
        alignment_share=alignment_share,
        elements=_elements(graph, op) * written if op.operands != "even" else 0.0,
        operands=op.operands,
        is_split=min((*input_shares, *output_shares), default=1.0) < 1,
    )


def _elements(graph: OperatorGraph, op: OpNode) -> int:
    return sum(prod(graph.values[value].shape) for value in op.outputs)


def _scaled(graph: OperatorGraph, values: tuple[int, ...], shares: list[float]) -> float:
    """Mean share of some values, weighted by their sizes."""
    sizes = [prod(graph.values[value].shape) for value in values]
    total = sum(sizes)
    return sum(s * x for s, x in zip(sizes, shares, strict=True)) / total if total else 1.0


def _matmul_sizes(
    graph: OperatorGraph, op: OpNode, shares: Sequence[list[float]]
) -> tuple[int, int, int, int]:
    """Batch, m, n, k of a product on one rank, from the shares of its operands over each axis.

    Split operands tell which size is divided: both of them k, only the left one m, only the
    right one n; a batch of products is divided as a whole.
    """
    left, right = (graph.values[value].shape for value in op.inputs[-2:])
    sizes = [left[0] if len(left) == 3 else 1, left[-2], right[-1], left[-1]]
    for left_share, right_share in (each[-2:] for each in shares):
        ranks = round(1 / min(left_share, right_share))
        if ranks > 1:
            if sizes[0] > 1:
                divided = 0
            elif left_share == right_share:
                divided = 3
            else:
                divided = 1 if left_share < 1 else 2
            sizes[divided] = max(1, sizes[divided] // ranks)
    batch, m, n, k = sizes
    return batch, m, n, k


def _recurrent_sizes(graph: OperatorGraph, op: OpNode) -> tuple[int, int, int]:
    """Rows, columns and length of the product of one step of an LSTM or GRU.

    A step waits for the one before, so that its product has the rows of one batch, and the steps
    run one after the other. The products with a layer's inputs, which need not wait, are counted
    with them.
    """
    shapes = [graph.values[value].shape for value in op.inputs]
    if op.phase is Phase.BACKWARD:
        # What was reserved for it, the one vector in front of the weights, precedes the state.
        shapes = shapes[next(i for i, shape in enumerate(shapes) if len(shape) == 1) :]
    state = shapes[1]
    recurrent = [shape for shape in shapes if len(shape) == 2][1]
    return state[-2], recurrent[0], recurrent[1]


def _alignment_share(graph: OperatorGraph, op: OpNode, m: int, n: int, k: int) -> float:
    """What the alignment of the rows of a product's operands and result leaves of its rate.

    Rows have the length of a layer's inputs or outputs: k and n where the product runs forward or
    reads a parameter, m and n where it makes a parameter's gradient. The number of tokens, which
    is the other size, is never a row's length.
    """
    storages = [graph.storages[graph.values[value].storage] for value in op.inputs]
    layer = any(storage.kind is StorageKind.PARAMETER for storage in storages)
    lengths = (k, n) if layer or op.phase is Phase.FORWARD else (m, n)
    itemsize = DTYPE_BYTES[graph.values[op.inputs[-1]].dtype]
    on_tensor_cores = itemsize == DTYPE_BYTES[Dtype.BFLOAT16]
    unaligned = any(length * itemsize % ROW_ALIGNMENT for length in lengths)
    return _UNALIGNED_SHARE if on_tensor_cores and unaligned else 1.0


def _attention_sizes(graph: OperatorGraph, op: OpNode, part: float) -> tuple[int, int, int, int]:
    """Batch times heads, queries, keys, head dim; heads are what is split."""
    first = 0 if op.phase is Phase.FORWARD else 1
    query, key = (graph.values[value].shape for value in op.inputs[first : first + 2])
    if len(query) != 4:
        return 1, 0, 0, 0
    heads = max(1, round(query[0] * query[1] * part))
    return heads, query[2], key[2], query[3]
