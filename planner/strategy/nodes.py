"""A unit's ops folded into the nodes whose layouts are decided together.

Layouts can change only where the script can change them: where a value enters or leaves a
module that owns parameters, and at the unit's boundary. So the ops of such a module are one
node, and the ops between modules ("glue": views, attention, activations, residual adds) fall
into connected regions, each of which is one node too. What is left to decide per node is one of
a few strategies.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import networkx as nx

from planner.graph.operator_graph import OperatorGraph, OpNode, StorageKind, Unit
from planner.runtime.layout import Layout
from planner.strategy.parameter_readers import (
    Readers,
    leaf_of,
    parameter_modules,
    readers_of_parameters,
)
from planner.strategy.sharding import SplitParameter


class NodeKind(StrEnum):
    """What a node is made of."""

    MODULE = "module"
    REGION = "region"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRows:
    """What a rank sends to the experts of others for one microbatch, and gets back.

    All ranks are taken to have equally many rows for their experts.
    """

    ranks: int
    """Ranks that share the experts."""
    readers: int
    """Ranks that read the same rows, each with its part of them: those of tp and cp."""
    weights: frozenset[int]
    """Values that are weights of experts, of which a rank has its own."""

    counts_bytes: int
    """How many rows go to each expert."""
    rows_bytes: int
    """The rows, each as often as it has experts."""
    experts_of_row: int
    """How many that is."""
    weights_bytes: int
    """Their weights."""
    has_trained_weights: bool
    """Whether the weights' gradients come back."""

    def within(self, ranks: int) -> "RoutedRows":
        """The same where the rows are a part that one of so many other ranks has."""
        return replace(
            self,
            readers=self.readers * ranks,
            rows_bytes=self.rows_bytes // ranks,
            weights_bytes=self.weights_bytes // ranks,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSum:
    """All-reduces over ranks of one number per row, in a loss over a split vocabulary."""

    op: int
    """The op that needs them."""
    num_bytes: int
    """Of each."""
    forward: int
    """How many while it runs forward."""
    backward: int
    """How many in its backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStrategy:
    """One way to run a node over the tp, cp or ep axis."""

    style: str
    """``ModuleSharding.style`` for a module, "region" for glue."""
    inputs: Mapping[int, Layout]
    """Layout in which each value from outside is read."""
    outputs: Mapping[int, Layout]
    """Layout in which each value that others read leaves, collectives done."""
    layouts: Mapping[int, Layout]
    """Layout of every value inside, parameters included, before collectives."""
    row_sums: tuple["RowSum", ...] = ()
    """Of losses over a split vocabulary."""
    split: tuple[SplitParameter, ...] = ()
    """The parameters that are split (kind MODULE)."""
    constant_input: Layout | None = None
    """Layout in which a module that reads nothing but a constant has it, None where it is whole."""
    summed_losses: tuple[int, ...] = ()
    """Losses that are sums over ranks where the model leaves them."""
    exchanged: Mapping[int, int] = field(default_factory=dict)
    """Values that change places: what attention reads and leaves split over the tokens, while
    inside it heads are split. With each how often its heads are sent (``head_copies``)."""
    routed: RoutedRows | None = None
    """What goes to the ranks of experts: each computes as much as all would, on other rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Ops whose layouts are decided together."""

    index: int
    """Position in ``ShardingProblem.nodes``."""
    kind: NodeKind
    """Module, region, or constants of the step."""
    module: str
    """Module path (kind MODULE), else ""."""
    ops: tuple[int, ...]
    """Its forward ops."""
    inputs: tuple[int, ...]
    """Values read from other nodes or the unit's boundary (no constants, no parameters)."""
    outputs: tuple[int, ...]
    """Values that other nodes or the unit's boundary read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedUnit:
    """A unit as nodes, before any layout is chosen."""

    unit: Unit
    """The unit."""
    nodes: tuple[Node, ...]
    """Nodes in the order of their first op."""
    boundary_inputs: tuple[int, ...]
    """Values that enter the unit and depend on a parameter."""
    boundary_outputs: tuple[int, ...]
    """Values that leave it and depend on a parameter."""
    constants: frozenset[int]
    """Values that depend on no parameter: available whole on every rank."""
    readers: Mapping[int, Readers]
    """Who reads the parameters of the model, by storage."""


_Group = tuple[NodeKind, str, list[int]]
"""Kind, module path and ops of a node."""


def fold_unit(graph: OperatorGraph, unit: Unit) -> FoldedUnit:
    """Fold the forward ops of a unit into nodes.

    Sizes have no part in it: what is folded in a graph is so in all that differ in them alone.

    Args:
        graph: The graph.
        unit: One of its units.

    Returns:
        Modules, regions and (at most one) node of constants, with the values between them.
    """
    key = "folded", unit.index
    if key not in graph.wiring:
        graph.wiring[key] = _folded(graph, unit)
    folded: FoldedUnit = graph.wiring[key]
    return replace(folded, unit=unit)


def _folded(graph: OperatorGraph, unit: Unit) -> FoldedUnit:
    wiring = _wiring(graph)
    entering, leaving = _boundary(graph, unit, wiring.reads)
    constants = _constants(graph, unit, entering)
    groups = _group(graph, unit, wiring.leaves, constants, entering)
    return FoldedUnit(
        unit=unit,
        nodes=tuple(_nodes(graph, groups, entering, leaving, constants)),
        boundary_inputs=tuple(entering),
        boundary_outputs=tuple(leaving),
        constants=frozenset(constants),
        readers=wiring.readers,
    )


def _wiring(graph: OperatorGraph) -> "_Wiring":
    """What all units of a graph are folded by."""
    key = "folded"
    if key not in graph.wiring:
        leaves = parameter_modules(graph)
        graph.wiring[key] = _Wiring(
            leaves=leaves,
            readers=readers_of_parameters(graph, leaves),
            reads=_forward_reads(graph),
        )
    found: _Wiring = graph.wiring[key]
    return found


def _nodes(
    graph: OperatorGraph,
    groups: list[_Group],
    entering: Collection[int],
    leaving: Collection[int],
    constants: Collection[int],
) -> Iterator[Node]:
    """Groups of ops with the values that go from one to another."""
    producer, readers = _uses(graph, groups)
    for index, (kind, module, ops) in enumerate(groups):
        inputs = [
            value
            for value in _read(graph, ops)
            if producer.get(value) != index and (value in producer or value in entering)
        ]
        outputs = [
            value
            for op in ops
            for value in graph.nodes[op].outputs
            if value in leaving or readers.get(value, set()) - {index}
        ]
        yield Node(
            index=index,
            kind=kind,
            module=module,
            ops=tuple(ops),
            inputs=tuple(value for value in inputs if value not in constants),
            outputs=tuple(value for value in outputs if value not in constants),
        )


def _uses(graph: OperatorGraph, groups: list[_Group]) -> tuple[dict[int, int], dict[int, set[int]]]:
    """Group that makes each value, and groups that read it."""
    producer: dict[int, int] = {}
    readers: dict[int, set[int]] = {}
    for index, (_, _, ops) in enumerate(groups):
        for op in ops:
            producer.update(dict.fromkeys(graph.nodes[op].outputs, index))
            for value in graph.nodes[op].inputs:
                readers.setdefault(value, set()).add(index)
    return producer, readers


def _read(graph: OperatorGraph, ops: list[int]) -> dict[int, None]:
    """Values that ops read, each once, in order."""
    return dict.fromkeys(value for op in ops for value in graph.nodes[op].inputs)


_Reads = Mapping[int, Sequence[tuple[int, int]]]
"""Where the forward reads each value: op and place among its inputs, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wiring:
    """Who holds and who reads what in a graph."""

    leaves: frozenset[str]
    """``parameter_modules``."""
    readers: Mapping[int, Readers]
    """``readers_of_parameters``."""
    reads: _Reads
    """``_forward_reads``."""


def _forward_reads(graph: OperatorGraph) -> _Reads:
    reads: dict[int, list[tuple[int, int]]] = {}
    for op in graph.nodes:
        for place, value in enumerate(op.inputs if op.phase == "forward" else ()):
            reads.setdefault(value, []).append((op.id, place))
    return reads


def _boundary(
    graph: OperatorGraph, unit: Unit, reads: _Reads
) -> tuple[dict[int, None], dict[int, None]]:
    """Values that cross the unit's two cuts, as far as the unit touches them.

    Those that depend on a parameter, frozen or not; every stage makes the others itself.
    """
    varying = graph.parametric_values
    made = {value for op in unit.forward_ops for value in graph.nodes[op].outputs}
    entering: dict[int, None] = {}
    for op in unit.forward_ops:
        for value in graph.nodes[op].inputs:
            kind = graph.storages[graph.values[value].storage].kind
            if value not in made and value in varying and kind is StorageKind.ACTIVATION:
                entering[value] = None
    own = set(unit.forward_ops)
    last = unit.forward_ops[-1] if unit.forward_ops else -1
    behind = {
        value: min(
            (at for at in reads.get(value, ()) if at[0] > last and at[0] not in own), default=None
        )
        for value in made & varying
    }
    leaving = sorted((at, value) for value, at in behind.items() if at is not None)
    return entering, dict.fromkeys(value for _, value in leaving)


def _constants(graph: OperatorGraph, unit: Unit, entering: Mapping[int, None]) -> set[int]:
    """Values read or made in the unit that descend from no parameter and no entering value."""
    varying = set(entering)
    constants: set[int] = set()
    for op_id in unit.forward_ops:
        op = graph.nodes[op_id]
        depends = False
        for value in op.inputs:
            kind = graph.storages[graph.values[value].storage].kind
            if value in varying or kind is StorageKind.PARAMETER:
                depends = True
            else:
                constants.add(value)
        (varying if depends else constants).update(op.outputs)
    return constants - varying


def _group(
    graph: OperatorGraph,
    unit: Unit,
    leaves: frozenset[str],
    constants: set[int],
    entering: Mapping[int, None],
) -> list[_Group]:
    """Split the ops into module calls, connected regions of glue, and constants."""
    modules: list[_Group] = []
    glue: list[OpNode] = []
    constant_ops: list[int] = []
    previous = ""
    for op_id in unit.forward_ops:
        op = graph.nodes[op_id]
        leaf = leaf_of(op.module, leaves)
        if leaf:
            if leaf != previous:
                modules.append((NodeKind.MODULE, leaf, []))
            modules[-1][2].append(op_id)
        elif all(value in constants for value in op.outputs):
            constant_ops.append(op_id)
        else:
            glue.append(op)
        previous = leaf
    groups = modules + [
        (NodeKind.REGION, "", ops) for ops in _components(glue, constants, set(entering), graph)
    ]
    if constant_ops:
        groups.append((NodeKind.CONSTANT, "", constant_ops))
    return sorted(groups, key=lambda group: group[2][0])


def _components(
    glue: list[OpNode], constants: set[int], entering: set[int], graph: OperatorGraph
) -> list[list[int]]:
    """Connected sets of glue ops: joined where one reads what another makes.

    Ops that read the same entering value are joined too, because the unit's input has one
    layout. Parameters read by glue do not join.
    """
    links: nx.Graph[int] = nx.Graph()
    links.add_nodes_from(op.id for op in glue)
    owner: dict[int, int] = {}
    for op in glue:
        for value in op.inputs:
            if value in owner:
                links.add_edge(op.id, owner[value])
            elif value in entering:
                owner[value] = op.id
        owner.update(dict.fromkeys(set(op.outputs) - constants, op.id))
    return [sorted(component) for component in nx.connected_components(links)]
