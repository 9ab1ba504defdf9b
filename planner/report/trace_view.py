"""What the screen says of a trace, as strings: no layout, no colour."""

from collections.abc import Sequence
from itertools import groupby

from planner.graph.analysis.causal import phase_masked_flop
from planner.graph.analysis.patterns import (
    BlockKind,
    block_kinds,
    saved_bytes_by_unit,
    unit_kinds,
    unit_letters,
    unit_sizes,
)
from planner.graph.analysis.retained import recompute_flop, retained_bytes
from planner.graph.analysis.summary import CutGroup, cut_groups
from planner.graph.operator_graph import OperatorGraph, Phase, RefusedCut
from planner.units import format_bytes, format_count, format_flop
from planner.vocabulary import RECOMPUTATIONS, Recomputation

KIND_HEAD = ("kind", "blocks", "first", "params", "forward", "backward", "saved", "ops")
"""Column heads of the table of kinds."""

UNIT_HEAD = ("unit", "kind", "params", "forward", "backward", "saved", "ops")
"""Column heads of the table of units."""

MOST_CUTS = 12
"""Groups of cuts that are listed without -v."""

MOST_CARRIED = 2
"""Tensors beside the stream that are named without -v."""

MASKED_HEAD = "masked"
"""Head of the column of FLOPs under causal masks; it is there where a model has some."""

MASKED_NOTE = (
    f"{MASKED_HEAD}: hidden by causal masks; counted, though fused kernels need not run it"
)
"""What that column holds."""


def work_table(graph: OperatorGraph) -> tuple[tuple[str, ...], ...]:
    """FLOPs in all and by token (or sample); the first row is the head."""
    flops = (graph.forward_flop, graph.backward_flop)
    columns: list[tuple[str, ...]] = [
        ("", "forward", "backward"),
        ("in all", *map(format_flop, flops)),
    ]
    if (parts := _num_parts(graph)) > 1:
        columns.append((_per_part(graph), *(format_flop(flop / parts) for flop in flops)))
    masked = [phase_masked_flop(graph, phase) for phase in (Phase.FORWARD, Phase.BACKWARD)]
    if any(masked):
        shares = (hidden / flop for hidden, flop in zip(masked, flops, strict=True))
        columns.append((MASKED_HEAD, *(f"{share:.1%}" for share in shares)))
    return tuple(zip(*columns, strict=True))


def kept_table(graph: OperatorGraph) -> tuple[tuple[str, ...], ...]:
    """Bytes kept for backward by recomputation of the blocks; the first row is the head."""
    ways = RECOMPUTATIONS if block_kinds(graph) else (Recomputation.NONE,)
    kept = [retained_bytes(graph, way) for way in ways]
    columns: list[tuple[str, ...]] = [
        ("recompute", *ways),
        ("kept", *map(format_bytes, kept)),
    ]
    if (parts := _num_parts(graph)) > 1:
        columns.append((_per_part(graph), *(format_bytes(each / parts) for each in kept)))
    if len(ways) > 1:
        again = [format_flop(recompute_flop(graph, way)) for way in ways[1:]]
        columns.append(("runs again", "", *again))
    return tuple(zip(*columns, strict=True))


def op_words(graph: OperatorGraph) -> str:
    """Count the ops: "26,113: 10,219 forward, 15,894 backward"."""
    num_forward = sum(op.phase is Phase.FORWARD for op in graph.nodes)
    total = len(graph.nodes)
    return f"{total:,}: {num_forward:,} forward, {total - num_forward:,} backward"


def kind_rows(graph: OperatorGraph) -> tuple[tuple[str, ...], ...]:
    """Sizes of one unit of each kind, columns as in ``KIND_HEAD``."""
    return tuple(
        (
            kind.letter,
            *((str(kind.count), kind.first) if kind.is_block else ("", "")),
            *_sizes(kind),
        )
        for kind in unit_kinds(graph)
    )


def unit_rows(graph: OperatorGraph) -> tuple[tuple[str, ...], ...]:
    """Sizes of every unit, columns as in ``UNIT_HEAD``."""
    saved = saved_bytes_by_unit(graph)
    rows = []
    for unit, letter in zip(graph.units, unit_letters(graph), strict=True):
        sizes = unit_sizes(graph, letter, [unit], saved[unit.index])
        rows.append((unit.name, "" if letter == unit.name else letter, *_sizes(sizes)))
    return tuple(rows)


def cut_words(graph: OperatorGraph) -> str:
    """Say at how many places the model can be cut."""
    count = len(graph.cuts)
    if count == 0:
        return "none"
    places = "1 place" if count == 1 else f"{count} places"
    return f"{places} for a stage to end, with what a microbatch sends"


def cut_rows(graph: OperatorGraph, *, verbose: bool) -> tuple[tuple[str, str, str, str], ...]:
    """Groups of alike cuts: where, how many, bytes, tensors."""
    return tuple(
        (
            group.place,
            f"{group.count} x" if group.count > 1 else "",
            format_bytes(group.crossing_bytes),
            " + ".join(group.tensors) if verbose else _crossing_words(group, graph.dtype),
        )
        for group in cut_groups(graph)
    )


def cut_notes(graph: OperatorGraph) -> tuple[str, ...]:
    """Say what else there is about the cuts."""
    notes = [graph.no_cut_reason] if graph.no_cut_reason else []
    if most := max((len(cut.constant_values) for cut in graph.cuts), default=0):
        tensors = "a tensor" if most == 1 else f"up to {most} tensors"
        notes.append(f"{tensors} without gradient (masks, tables): each stage makes them again")
    tied = {parameter for cut in graph.cuts for parameter in cut.tied_parameters}
    if tied:
        names = ", ".join(" = ".join(graph.parameters[each].names) for each in sorted(tied))
        notes.append(f"read on both sides, so that both stages hold it: {names}")
    return tuple(notes)


def refused_rows(graph: OperatorGraph) -> tuple[tuple[str, str], ...]:
    """Group neighbouring places where the model cannot be cut, with the reason."""
    groups = [list(group) for _, group in groupby(graph.refused_cuts, lambda cut: cut.reason)]
    return tuple((_refused_place(graph, group), group[0].reason) for group in groups)


def _num_parts(graph: OperatorGraph) -> int:
    return graph.microbatch_size * graph.tokens_per_sample


def _per_part(graph: OperatorGraph) -> str:
    return "per token" if graph.tokens_per_sample > 1 else "per sample"


def _sizes(kind: BlockKind) -> tuple[str, ...]:
    return (
        format_count(kind.num_parameters),
        format_flop(kind.forward_flop),
        format_flop(kind.backward_flop),
        format_bytes(kind.saved_bytes),
        f"{kind.num_ops:,}",
    )


def _crossing_words(group: CutGroup, dtype: str) -> str:
    """Say briefly what is sent: the stream's shape, and what is carried beside it."""
    stream = group.tensors[0].removeprefix(f"{dtype} ")
    if not group.carried:
        return stream
    if len(group.carried) > MOST_CARRIED:
        return f"{stream} + {len(group.carried)} others"
    return f"{stream} + {' + '.join(group.carried)}"


def _refused_place(graph: OperatorGraph, group: Sequence[RefusedCut]) -> str:
    first, last = (graph.units[cut.after_unit].name for cut in (group[0], group[-1]))
    return f"after {first}" if first == last else f"after {first} to {last}"
