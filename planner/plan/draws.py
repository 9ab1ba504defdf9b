"""Random draws of a model that come out otherwise under a plan than on one device.

Each microbatch has a seed that all ranks share (``planner.runtime.data``). What ranks draw for
parts of a tensor is other than what one device draws for all of it; and where earlier blocks are
on other ranks, what they would have drawn comes first. On GPUs the blocks of each stage begin with
a seed of their own.
"""

from collections.abc import Iterator, Sequence

from planner.graph.operator_graph import OperatorGraph, UnitKind
from planner.plan.record import OpRow
from planner.plan.types import Plan


def draw_warnings(
    plan: Plan, graph: OperatorGraph, rows: Sequence[OpRow], *, on_cpus: bool
) -> tuple[str, ...]:
    """Name the lines whose draws differ, in a sentence.

    Args:
        plan: The plan.
        graph: Its model, at the plan's microbatch size.
        rows: The plan's forward ops.
        on_cpus: Whether ranks run on CPUs.
    """
    row_of = dict(zip((op for unit in graph.units for op in unit.forward_ops), rows, strict=True))
    split = [place for op, place in graph.draws if row_of[op].placement.startswith("Shard")]
    staged = list(_staged(graph, row_of, on_cpus=on_cpus)) if plan.degrees.pp > 1 else []
    places = tuple(dict.fromkeys((*split, *staged)))
    if not places:
        return ()
    axis = " and ".join(plan.degrees.split_axes)
    reasons = [
        *([f"each rank of {axis} draws for its own part of a tensor"] if split else ()),
        *(["stages do not draw what the blocks of others would"] if staged else ()),
    ]
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return (
        f"{places[0]}{more} draw{'' if more else 's'} random numbers, and {' and '.join(reasons)}: "
        "losses are not those of one device, only alike on average",
    )


def _staged(graph: OperatorGraph, row_of: dict[int, OpRow], *, on_cpus: bool) -> Iterator[str]:
    """Lines that draw in a stage after blocks of others, or on GPUs anywhere behind the first."""
    kinds = {op: graph.units[graph.unit_of_op[op]].kind for op, _ in graph.draws}
    first = min(
        (row_of[op].stage for op, kind in kinds.items() if kind is UnitKind.BLOCK), default=None
    )
    for op, place in graph.draws:
        is_late = first is not None and row_of[op].stage > first
        if is_late if on_cpus else kinds[op] is not UnitKind.PROLOGUE:
            yield place
