"""What a trace warns of: what it assumed, and signs that it is not what training runs."""

from collections import Counter

from planner.graph.operator_graph import OperatorGraph, Phase

MOST_RUNS = 500
"""Runs of one op in one module's forward above which it stands in a loop over tokens."""

MOST_NAMED = 3
"""Parameters that are named."""

MOST_LOST = 0.05
"""Part of forward whose results may be left over."""


def trace_warnings(graph: OperatorGraph) -> tuple[str, ...]:
    """List the graph's notes and what is suspicious about it, in sentences."""
    found = (_unread_parameters(graph), _long_loop(graph), _lost_work(graph))
    return (*graph.notes, *filter(None, found))


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


def _long_loop(graph: OperatorGraph) -> str:
    """The module that runs an op most often, where that is a loop in Python."""
    runs = Counter((op.module, op.name) for op in graph.nodes if op.phase is Phase.FORWARD)
    (module, name), count = max(runs.items(), key=lambda item: item[1])
    if count <= MOST_RUNS:
        return ""
    return (
        f"{module or graph.model} runs {name} {count:,} times in a forward pass: a loop over "
        "tokens in Python, or a missing fused kernel; on a GPU it may run differently"
    )


def _lost_work(graph: OperatorGraph) -> str:
    """Forward work that could have a gradient and gets none.

    A checkpoint that is differentiated on its second run has its backward there.
    """
    differentiated = {op.forward_op for op in graph.nodes}
    run_again = {
        (op.module, op.name)
        for op in graph.nodes
        if op.phase is Phase.BACKWARD and op.forward_op is None and op.flop
    }
    lost = [
        op
        for op in graph.nodes
        if op.flop
        and op.phase is Phase.FORWARD
        and op.id not in differentiated
        and (op.module, op.name) not in run_again
        and any(graph.values[value].requires_grad for value in op.outputs)
    ]
    share = sum(op.flop for op in lost) / max(1, graph.forward_flop)
    if share <= MOST_LOST:
        return ""
    return (
        f"{share:.0%} of the FLOPs of forward, the first in {lost[0].module or graph.model}, have "
        "no backward: their results are detached or left over. Backward has "
        f"{graph.backward_flop / graph.forward_flop:.2f} times the FLOPs of forward"
    )
