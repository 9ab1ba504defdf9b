"""Signs that a trace is not what training runs."""

from planner.graph.operator_graph import OperatorGraph

MOST_OPS = 100_000
"""Ops above which a model most likely loops over tokens in Python."""

MOST_NAMED = 3
"""Parameters that are named."""


def doubts(graph: OperatorGraph) -> tuple[str, ...]:
    """Say what is suspicious about a graph, in sentences."""
    return tuple(filter(None, (_unread_parameters(graph), _too_many_ops(graph))))


def _unread_parameters(graph: OperatorGraph) -> str:
    """Parameters that no op reads: the trace took another branch, or they are superfluous."""
    read = {parameter for unit in graph.units for parameter in unit.parameters}
    unread = [
        parameter.names[0]
        for position, parameter in enumerate(graph.parameters)
        if parameter.requires_grad and position not in read
    ]
    if not unread:
        return ""
    hidden = len(unread) - MOST_NAMED
    names = ", ".join(unread[:MOST_NAMED]) + (f" and {hidden} more" if hidden > 0 else "")
    return (
        f"{len(unread)} of {len(graph.parameters)} parameters are read by no operator ({names}): "
        "training may take another branch of the model than this trace did"
    )


def _too_many_ops(graph: OperatorGraph) -> str:
    if len(graph.nodes) <= MOST_OPS:
        return ""
    return (
        f"{len(graph.nodes):,} operators: a loop over tokens in Python, or an operator without "
        "its fused kernel; on a GPU such a model may run differently"
    )
