"""Products that may be taken in float8."""

from planner.graph.operator_graph import OperatorGraph, OpNode


def is_float8_product(graph: OperatorGraph, op: OpNode) -> bool:
    """Whether a forward op is the product of a module that may multiply in float8."""
    return op.name in ("mm", "addmm") and op.module in graph.float8_modules
