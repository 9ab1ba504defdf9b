"""The operator graph in a few lines of words, for notebooks and terminals."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from planner.graph.analysis.patterns import block_kinds, block_pattern
from planner.graph.operator_graph import CutPoint, OperatorGraph, TensorValue
from planner.units import format_bytes, format_count, format_flop


@dataclass(frozen=True, slots=True, kw_only=True)
class CutGroup:
    """Neighbouring cuts across which tensors of the same sizes are sent."""

    first: str
    """Unit before the first of them."""
    last: str
    """Unit before the last of them."""
    count: int
    """How many cuts."""
    crossing_bytes: int
    """Bytes sent across one of them, for one microbatch."""
    tensors: tuple[str, ...]
    """What is sent, the stream first: "bfloat16 1 x 8192 x 4096", and "of MODULE" where it is
    carried beside the stream."""
    carried: tuple[str, ...]
    """Modules whose outputs are sent beside the stream."""

    @property
    def place(self) -> str:
        """Where they are: "after layers.0", "after layers.0 to layers.125"."""
        return f"after {self.first}" + (f" to {self.last}" if self.count > 1 else "")


def cut_groups(graph: OperatorGraph) -> tuple[CutGroup, ...]:
    """Group cuts between neighbouring units across which the same is sent."""
    groups: list[list[CutPoint]] = []
    previous: tuple[object, ...] = ()
    for place, cut in enumerate(graph.cuts):
        # A cut's unit minus its place is the same for cuts that follow each other without a gap.
        key = (cut.after_unit - place, crossing_words(graph, cut))
        if key != previous:
            groups.append([])
        groups[-1].append(cut)
        previous = key
    return tuple(_cut_group(graph, group) for group in groups)


def crossing_words(graph: OperatorGraph, cut: CutPoint) -> tuple[str, ...]:
    """Describe the tensors that are sent across a cut, the stream first."""
    stream, *others = (tensor_words(graph.values[value]) for value in cut.values)
    carried = [f"{words} of {made.module}" for words, made in zip(others, cut.carried, strict=True)]
    return (stream, *carried)


def tensor_words(tensor: TensorValue) -> str:
    """Describe a tensor: "bfloat16 1 x 8192 x 4096"."""
    return f"{tensor.dtype} {shape_words(tensor.shape)}"


def shape_words(shape: Sequence[int]) -> str:
    """Spell a shape: "1 x 8192 x 4096", "scalar" where it has no dims."""
    return " x ".join(map(str, shape)) or "scalar"


def batch_words(graph: OperatorGraph) -> str:
    """Say what a graph was traced for: "microbatch 1 x 8192 tokens, bfloat16"."""
    tokens = f" x {graph.tokens_per_sample} tokens" if graph.tokens_per_sample > 1 else ""
    dtype = f", {graph.dtype}" if graph.dtype else ""
    return f"microbatch {graph.microbatch_size}{tokens}{dtype}"


def parameter_words(graph: OperatorGraph) -> str:
    """Count the parameters: "8.03 B", "8.03 B, 20 M of them trained"."""
    trained = graph.num_trainable_parameters
    frozen = trained != graph.num_parameters
    return format_count(graph.num_parameters) + (
        f", {format_count(trained)} of them trained" if frozen else ""
    )


def summary_rows(graph: OperatorGraph) -> tuple[tuple[str, str], ...]:
    """Give the graph's figures as pairs of a name and a formatted value."""
    return (
        ("parameters", parameter_words(graph)),
        ("forward", format_flop(graph.forward_flop)),
        ("backward", format_flop(graph.backward_flop)),
        ("saved for backward", format_bytes(graph.saved_bytes)),
        ("operators", f"{len(graph.nodes):,}"),
        ("blocks", str(block_pattern(graph)) or "none"),
        ("cuts", str(len(graph.cuts))),
    )


def summary_words(graph: OperatorGraph) -> str:
    """Give the graph's figures on one line."""
    figures = ", ".join(f"{name} {value}" for name, value in summary_rows(graph))
    name = f"{graph.model!r}, " if graph.model else ""
    return f"{name}{batch_words(graph)}: {figures}"


def summary_html(graph: OperatorGraph) -> str:
    """Give the graph's figures and its kinds of blocks as two small HTML tables."""
    figures = "".join(_html_row("td", row) for row in summary_rows(graph))
    title = escape(" ".join(filter(None, (graph.model, f"({batch_words(graph)})"))))
    tables = f"<p><b>{title}</b></p><table>{figures}</table>"
    kinds = block_kinds(graph)
    if not kinds:
        return tables
    head = ("block", "count", "first", "parameters", "forward", "backward", "saved")
    rows = "".join(
        _html_row(
            "td",
            (
                kind.letter,
                str(kind.count),
                kind.first,
                format_count(kind.num_parameters),
                format_flop(kind.forward_flop),
                format_flop(kind.backward_flop),
                format_bytes(kind.saved_bytes),
            ),
        )
        for kind in kinds
    )
    return f"{tables}<table>{_html_row('th', head)}{rows}</table>"


def _cut_group(graph: OperatorGraph, cuts: Sequence[CutPoint]) -> CutGroup:
    return CutGroup(
        first=graph.units[cuts[0].after_unit].name,
        last=graph.units[cuts[-1].after_unit].name,
        count=len(cuts),
        crossing_bytes=cuts[0].crossing_bytes,
        tensors=crossing_words(graph, cuts[0]),
        carried=tuple(made.module for made in cuts[0].carried),
    )


def _html_row(tag: str, cells: Sequence[str]) -> str:
    inside = "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)
    return f"<tr>{inside}</tr>"
