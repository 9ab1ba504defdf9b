"""The forward pass as a picture: Graphviz text.

The first block of each kind is drawn operator by operator, the blocks that repeat it as one box,
so that a model of any depth stays readable. Views are left out (what reads a view is joined to
what the view shows), and so are parameters and buffers. The backward pass runs the same edges the
other way.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from planner.graph.analysis.patterns import find_pattern, unit_letters
from planner.graph.analysis.summary import batch_words, parameter_words, shape_words, tensor_words
from planner.graph.operator_graph import OperatorGraph, OpNode, Unit, UnitKind
from planner.units import format_bytes, format_count, format_flop

_HEAD = """digraph model {
  graph [rankdir=TB, labelloc=t, fontname="Helvetica", fontsize=14, nodesep=0.2, ranksep=0.3];
  node [shape=box, style="rounded,filled", fillcolor="white", fontname="Helvetica", fontsize=10];
  edge [fontname="Helvetica", fontsize=9, arrowsize=0.6];
"""

_COMPUTE_COLOUR = "#fde0b6"
"""Operators that are counted in FLOPs."""

_FOLDED_COLOUR = "#dbe9f6"
"""Blocks that repeat what is drawn."""


@dataclass(slots=True)
class _Piece:
    """Neighbouring units that are drawn in one place."""

    units: list[Unit]
    letters: list[str]
    folded: bool


class _Drawing:
    """What is drawn, and how it is joined."""

    def __init__(self, graph: OperatorGraph) -> None:
        self.graph = graph
        self.piece: dict[str, int] = {}
        """Piece by drawn node."""
        self._origin: dict[int, str] = {}
        """Drawn node by value that it makes or shows."""
        self._joined: dict[tuple[str, str], dict[int, int]] = {}
        """By pair of drawn nodes: bytes by storage that goes from the one to the other."""

    def add_input(self, value: int, node: str) -> None:
        """Draw a tensor that the step starts from."""
        self._origin[value] = node

    def add_op(self, op: OpNode, node: str, piece: int) -> bool:
        """Draw an op as (part of) a node, joined to what made its inputs.

        Returns:
            False for a view, which is not drawn.
        """
        if op.is_view:
            origin = next((self._origin[each] for each in op.inputs if each in self._origin), None)
            if origin is not None:
                self._origin.update(dict.fromkeys(op.outputs, origin))
            return False
        for value in op.inputs:
            origin = self._origin.get(value)
            if origin is not None and origin != node:
                tensor = self.graph.values[value]
                joined = self._joined.setdefault((origin, node), {})
                joined[tensor.storage] = max(joined.get(tensor.storage, 0), tensor.size_bytes)
        self._origin.update(dict.fromkeys(op.outputs, node))
        self.piece[node] = piece
        return True

    def edges(self) -> Iterator[str]:
        """Write the edges; those between pieces say how many bytes they carry."""
        for (origin, node), joined in self._joined.items():
            crosses = self.piece.get(origin) != self.piece[node]
            label = f" [label={_quote(format_bytes(sum(joined.values())))}]" if crosses else ""
            yield f"  {origin} -> {node}{label};"


def dot_text(graph: OperatorGraph) -> str:
    """Write the forward pass of a graph in Graphviz' language."""
    drawing = _Drawing(graph)
    facts = f"{parameter_words(graph)} parameters, forward pass, {batch_words(graph)}"
    lines = [_HEAD, f"  label={_quote(f'{graph.model}: {facts}')};"]
    lines.extend(_inputs(drawing))
    for number, piece in enumerate(_pieces(graph)):
        write = _folded if piece.folded else _drawn
        lines.extend(write(drawing, number, piece))
    lines.extend(drawing.edges())
    return "\n".join(lines) + "\n}\n"


def _pieces(graph: OperatorGraph) -> list[_Piece]:
    """Divide the units into those that are drawn and runs of those that repeat them."""
    pieces: list[_Piece] = []
    drawn: set[str] = set()
    for unit, letter in zip(graph.units, unit_letters(graph), strict=True):
        folded = letter in drawn
        drawn.add(letter)
        if folded and pieces[-1].folded:
            pieces[-1].units.append(unit)
            pieces[-1].letters.append(letter)
        else:
            pieces.append(_Piece([unit], [letter], folded))
    return pieces


def _inputs(drawing: _Drawing) -> Iterator[str]:
    """Draw the model's inputs and targets."""
    graph = drawing.graph
    made = {value for op in graph.nodes for value in op.outputs}
    for value in graph.values:
        storage = graph.storages[value.storage]
        if not storage.kind.is_of_batch or value.id in made:
            continue
        node = f"value{value.id}"
        drawing.add_input(value.id, node)
        label = _quote(f"{storage.name}\n{tensor_words(value)}")
        yield f"  {node} [label={label}, shape=ellipse, style=solid];"


def _folded(drawing: _Drawing, number: int, piece: _Piece) -> Iterator[str]:
    """Draw blocks that repeat others as one box."""
    graph, node = drawing.graph, f"blocks{number}"
    first, last = piece.units[0].name, piece.units[-1].name
    names = first if len(piece.units) == 1 else f"{first} to {last}"
    label = _quote(f"{names}\n{find_pattern(piece.letters)}")
    for unit in piece.units:
        for op_id in unit.forward_ops:
            drawing.add_op(graph.nodes[op_id], node, number)
    yield f'  {node} [label={label}, shape=box3d, style=filled, fillcolor="{_FOLDED_COLOUR}"];'


def _drawn(drawing: _Drawing, number: int, piece: _Piece) -> Iterator[str]:
    """Draw a unit as a cluster, its modules with more than one operator as clusters in it."""
    graph = drawing.graph
    (unit,), (letter,) = piece.units, piece.letters
    groups: dict[str, list[OpNode]] = {}
    for op_id in unit.forward_ops:
        op = graph.nodes[op_id]
        if drawing.add_op(op, f"op{op_id}", number):
            groups.setdefault(unit.path_of(op.module).partition(".")[0], []).append(op)
    yield f"  subgraph cluster_{number} {{"
    yield f'    label={_quote(_unit_words(graph, unit, letter))}; color="grey60"; fontsize=12;'
    for place, (group, ops) in enumerate(groups.items()):
        boxed = bool(group) and len(ops) > 1
        if boxed:
            yield f"    subgraph cluster_{number}_{place} {{"
            yield f'    label={_quote(group)}; color="grey80"; fontsize=11;'
        for op in ops:
            path = unit.path_of(op.module)
            yield _op_line(graph, op, path.partition(".")[2] if boxed else path)
        if boxed:
            yield "    }"
    yield "  }"


def _op_line(graph: OperatorGraph, op: OpNode, path: str) -> str:
    words = [path, op.name] if path else [op.name]
    if op.outputs:
        words.append(shape_words(graph.values[op.outputs[0]].shape))
    if op.flop:
        words.append(format_flop(op.flop))
    colour = f', fillcolor="{_COMPUTE_COLOUR}"' if op.flop else ""
    return f"    op{op.id} [label={_quote(chr(10).join(words))}{colour}];"


def _unit_words(graph: OperatorGraph, unit: Unit, letter: str) -> str:
    count = sum(graph.parameters[each].num_elements for each in unit.parameters)
    kind = f" ({letter})" if unit.kind is UnitKind.BLOCK else ""
    return f"{unit.name}{kind}: {format_count(count)} parameters"


def _quote(words: str) -> str:
    """Quote a label: backslashes and quotes escaped, line ends as Graphviz writes them."""
    escaped = words.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
