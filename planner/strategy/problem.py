"""The sharding problem of one unit: its nodes and their strategies."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from planner.graph.operator_graph import OperatorGraph, Unit, UnitKind
from planner.runtime.layout import REPLICATE, Layout, SplitAxis, can_shard, shard
from planner.strategy.expert_strategies import expert_strategies
from planner.strategy.inner_strategies import inner_strategies
from planner.strategy.module_strategies import module_strategies
from planner.strategy.nodes import FoldedUnit, Node, NodeKind, NodeStrategy
from planner.strategy.region_strategies import exchanged, obstacle_of, region_strategies
from planner.strategy.unit_context import UnitContext
from planner.vocabulary import SPLIT_STYLES, Axis, Style, split_styles


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLayouts:
    """How a unit lies on cp, where tp splits in turn what each of its ranks has.

    The two split a tensor one after the other, and each follows through ops by the rules for one
    axis: what is local to the ranks of one is local to those of both. So a rank has of a tensor the
    product of its shares.
    """

    ranks: int
    """Ranks of cp."""
    chosen: tuple[NodeStrategy, ...]
    """The strategy of each node."""
    boundary: Layout
    """Layout in which values enter and leave the unit."""
    left: Mapping[int, Layout]
    """Layout in which each value is left for others."""
    conversions: Mapping[int, tuple[tuple[int, Layout, Layout], ...]]
    """Changes of layout in front of modules, by the node that first needs each: value, from, to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingProblem:
    """What the sharding ILP decides for one unit, tp degree and stream layout."""

    context: UnitContext
    """Graph, tp and stream layout."""
    unit: Unit
    """The unit."""
    folded: FoldedUnit
    """Nodes and the values between them."""
    strategies: tuple[tuple[NodeStrategy, ...], ...]
    """Strategies of each node; an empty tuple makes the problem infeasible."""
    around: ContextLayouts | None = None
    """The unit on cp, where the problem is about tp inside its parts."""
    obstacle: str = ""
    """What has no strategy, where something has none."""

    @property
    def boundary(self) -> Layout:
        """Layout in which values enter and leave the unit."""
        return self.context.stream


def sharding_problem(
    graph: OperatorGraph,
    folded: FoldedUnit,
    *,
    over: SplitAxis,
    sequence_dim: int | None,
    split_tables: bool | None = None,
    whole: frozenset[str] = frozenset(),
) -> ShardingProblem:
    """Set up the choice of layouts for a unit.

    Args:
        graph: The model.
        folded: One of its units, by ``fold_unit``.
        over: The axis; one rank leaves nothing to choose.
        sequence_dim: Tensor dim that sequence parallelism splits between the sharded regions
            of a block, None without sequence parallelism: prologue and epilogue then run on the
            whole stream. Over cp it is split in all units.
        split_tables: Whether the rows of vocabulary-sized weights (embedding tables, and heads
            that share their weight) are split; None leaves it open.
        whole: Modules that are not split, by their paths in the unit.

    Returns:
        Nodes with all their legal strategies.
    """
    unit = folded.unit
    context = _context(graph, folded, over, sequence_dim)
    if (misfit := misfit_of(folded, context)) is not None:
        return _unsplit(folded, context, misfit)
    modules = _module_strategies(folded, unit, context, split_tables=split_tables)
    _leave_whole(modules, folded, unit, whole, context.axis)
    for index, ways in modules.items():
        modules[index] = tuple(each for each in ways if _allowed(each, folded, context))
    _make_alike(modules, folded)
    candidates = _candidates(folded, modules, context.stream)
    strategies = [_of_node(node, folded, context, modules, candidates) for node in folded.nodes]
    stuck = next((n for n, found in zip(folded.nodes, strategies, strict=True) if not found), None)
    return ShardingProblem(
        context=context,
        unit=unit,
        folded=folded,
        strategies=tuple(strategies),
        obstacle="" if stuck is None else obstacle_of(stuck, context, candidates),
    )


def _of_node(
    node: Node,
    folded: FoldedUnit,
    context: UnitContext,
    modules: "Strategies",
    candidates: "Candidates",
) -> tuple[NodeStrategy, ...]:
    """Strategies of a node, those of modules being known."""
    if node.kind is NodeKind.MODULE:
        found = modules[node.index]
    elif node.kind is NodeKind.REGION:
        found = region_strategies(node, context, candidates)
    else:
        found = (_constant(node),)
    allowed = [each for each in found if _allowed(each, folded, context)]
    sent = (exchanged(node, each, context) for each in allowed)
    return tuple(
        replace(each, exchanged=values) if values else each
        for each, values in zip(allowed, sent, strict=True)
    )


def _unsplit(folded: FoldedUnit, context: UnitContext, misfit: tuple[int, ...]) -> ShardingProblem:
    """The problem of a unit at whose boundary a value of some shape has no such parts."""
    return ShardingProblem(
        context=context,
        unit=folded.unit,
        folded=folded,
        strategies=((),) * len(folded.nodes),
        obstacle=f"a tensor of {misfit} enters or leaves it, and {context.ranks} ranks cannot have "
        f"equal parts of its dim {context.stream.dim} as of a sequence",
    )


def _context(
    graph: OperatorGraph, folded: FoldedUnit, over: SplitAxis, sequence_dim: int | None
) -> UnitContext:
    """What the strategies of the unit's nodes depend on."""
    in_block = folded.unit.kind is UnitKind.BLOCK
    is_split = in_block or over.is_context
    stream = shard(sequence_dim) if sequence_dim is not None and is_split else REPLICATE
    shape = _stream_shape(graph, folded, stream)
    joins_dims = stream.is_shard and (over.is_context or over.experts > 1)
    return UnitContext(
        graph=graph,
        constants=folded.constants,
        ranks=over.size,
        axis=Axis(over.name),
        experts=over.size if over.is_inside_blocks else over.experts,
        sequence=shape[stream.dim] if shape and joins_dims else None,
        least_split=_least_split(graph, folded.unit) if over.experts > 1 else 0,
        before=prod(shape[: stream.dim]),
        stream=stream,
        readers=_readers(graph, folded.unit),
    )


_SMALL_SHARE = 0.01
"""Share of a unit's parameters that a matrix may have and be whole on each rank: a router's, say,
which so reads the part of the stream that its rank has."""


def _least_split(graph: OperatorGraph, unit: Unit) -> int:
    """Elements of a matrix that counts among those of its unit."""
    total = sum(graph.parameters[index].num_elements for index in unit.parameters)
    return int(total * _SMALL_SHARE) + 1


def _stream_shape(graph: OperatorGraph, folded: FoldedUnit, stream: Layout) -> tuple[int, ...]:
    """Shape of the stream where it enters the unit, or leaves it."""
    values = (*folded.boundary_inputs, *folded.boundary_outputs)
    shapes = (graph.values[value].shape for value in values)
    return next((shape for shape in shapes if len(shape) > stream.dim), ())


def _leave_whole(
    modules: "Strategies", folded: FoldedUnit, unit: Unit, whole: frozenset[str], axis: Axis
) -> None:
    """Drop the strategies that split modules which are not to be split."""
    for node in folded.nodes:
        if node.kind is NodeKind.MODULE and unit.path_of(node.module) in whole:
            found = modules[node.index]
            modules[node.index] = tuple(s for s in found if s.style not in split_styles(axis))


def _make_alike(modules: "Strategies", folded: FoldedUnit) -> None:
    """Give all calls of one module the same strategies: the script has one instruction for it."""
    calls: dict[str, list[Node]] = {}
    for node in folded.nodes:
        if node.kind is NodeKind.MODULE:
            calls.setdefault(node.module, []).append(node)
    for nodes in calls.values():
        if len(nodes) == 1:
            continue
        first = next((node for node in nodes if node.outputs), nodes[0])
        ways = [{_way(each, node): each for each in modules[node.index]} for node in nodes]
        common = [
            each
            for each in modules[first.index]
            if all(_way(each, node) in own for node, own in zip(nodes, ways, strict=True))
        ]
        for node, own in zip(nodes, ways, strict=True):
            modules[node.index] = tuple(own[_way(each, node)] for each in common)


def _way(strategy: NodeStrategy, call: Node) -> tuple[object, ...]:
    """A strategy as one call of its module sees it, apart from the call's values.

    Constants and what else is whole may be read by one call and not by another; and where nobody
    reads what a call returns, it may leave in any layout.
    """
    read = {*strategy.inputs.values(), strategy.constant_input} - {REPLICATE, None}
    outputs = tuple(strategy.outputs.values()) if call.outputs else ()
    return strategy.style, strategy.split, frozenset(read), outputs


Strategies = dict[int, tuple[NodeStrategy, ...]]
"""Strategies by node."""
Candidates = dict[int, list[Layout]]
"""Layouts in which each value between nodes can be had."""


def _of_place(found: tuple[NodeStrategy, ...], node: Node, unit: Unit) -> tuple[NodeStrategy, ...]:
    """Leave a module whole that runs between blocks (an encoder's last norm).

    The script splits modules of blocks by block, and those before and after the blocks.
    """
    if unit.kind is not UnitKind.BLOCK or f"{node.module}.".startswith(f"{unit.name}."):
        return found
    return tuple(strategy for strategy in found if strategy.style == Style.REPLICATE)


def _module_strategies(
    folded: FoldedUnit, unit: Unit, context: UnitContext, *, split_tables: bool | None
) -> Strategies:
    """Strategies of the unit's modules; on one rank there is one way to run each."""
    graph = context.graph
    tables = graph.table_storages
    modules = {
        node.index: _of_readers(
            _of_place(_ways(node, context), node, unit), node, folded, context, tables
        )
        for node in folded.nodes
        if node.kind is NodeKind.MODULE
    }
    if context.ranks == 1:
        return {index: found[:1] for index, found in modules.items()}
    if split_tables is None:
        return modules
    return {
        index: tuple(s for s in found if _treats_tables(s, graph, tables, split=split_tables))
        for index, found in modules.items()
    }


def _of_readers(
    found: tuple[NodeStrategy, ...],
    node: Node,
    folded: FoldedUnit,
    context: UnitContext,
    tables: frozenset[int],
) -> tuple[NodeStrategy, ...]:
    """Leave out what others that read the module's parameters would not bear.

    Whoever else reads a parameter needs all of it, and has all of its gradient, which is no summand
    of a sum over ranks as that of a module on a part is over tp. Modules of several kinds of unit
    are laid out apart; tables are split all or none.
    """
    graph = context.graph
    read = {graph.values[value].storage for op in node.ops for value in graph.nodes[op].inputs}
    own = read & folded.readers.keys()
    readers = [folded.readers[storage] for storage in own]
    dropped: set[str] = set()
    if any(each.others or len(each.modules) > 1 for each in readers) and context.axis is Axis.TP:
        dropped.add(Style.ON_PART)
    if any(each.others for each in readers) or any(
        folded.readers[storage].num_structures > 1 for storage in own - tables
    ):
        dropped |= {Style.EXPERTS, *SPLIT_STYLES}
    return tuple(strategy for strategy in found if strategy.style not in dropped)


def _ways(node: Node, context: UnitContext) -> tuple[NodeStrategy, ...]:
    """All strategies of a module.

    Inside a product of its own only where it is no other layer. One of experts has no other way
    where ranks share them: what that is for, the smaller gathers of its state, is in no price of
    its unit.
    """
    if context.experts > 1 and (experts := expert_strategies(node, context)) is not None:
        return experts
    found = module_strategies(node, context)
    if context.ranks == 1 or context.axis is not Axis.TP:
        return found
    if any(each.style in SPLIT_STYLES for each in found):
        return found
    return (*found, *inner_strategies(node, context))


def _candidates(folded: FoldedUnit, modules: Strategies, stream: Layout) -> Candidates:
    """Layouts in which each value between nodes can be had."""
    candidates: Candidates = {value: [stream] for value in folded.boundary_inputs}
    for found in modules.values():
        for strategy in found:
            for value, layout in strategy.outputs.items():
                known = candidates.setdefault(value, [])
                if layout not in known:
                    known.append(layout)
    return candidates


def _readers(graph: OperatorGraph, unit: Unit) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for op_id in unit.forward_ops:
        for value in graph.nodes[op_id].inputs:
            found[value] = (*found.get(value, ()), op_id)
    return found


def _treats_tables(
    strategy: NodeStrategy, graph: OperatorGraph, tables: frozenset[int], *, split: bool
) -> bool:
    """Whether a strategy that reads a table has it split (or whole), as asked."""
    if not any(graph.values[value].storage in tables for value in strategy.layouts):
        return strategy.style != Style.VOCAB_EMBEDDING  # a table of positions, say
    return strategy.style in (
        (Style.VOCAB_EMBEDDING, Style.COLUMN) if split else (Style.REPLICATE,)
    )


def _constant(node: Node) -> NodeStrategy:
    return NodeStrategy(style="region", inputs={}, outputs={}, layouts={})


def misfit_of(folded: FoldedUnit, context: UnitContext) -> tuple[int, ...] | None:
    """Shape of a value at the unit's boundary that cannot lie in the stream layout, if any."""
    stream = context.stream
    if not stream.is_shard:
        return None
    values = (*folded.boundary_inputs, *folded.boundary_outputs)
    shapes = (context.graph.values[value].shape for value in values)
    return next(
        (
            shape
            for shape in shapes
            if len(shape) <= stream.dim + 1 or not can_shard(shape, stream, context.ranks)
        ),
        None,
    )


def _allowed(strategy: NodeStrategy, folded: FoldedUnit, context: UnitContext) -> bool:
    """Whether boundary values keep the stream layout."""
    outputs = strategy.outputs
    return all(outputs[v] == context.stream for v in folded.boundary_outputs if v in outputs)
