"""How large a step may be."""

from planner.errors import ModelError
from planner.graph.loading.source import lines_of_stack

MOST_OPS = 1_000_000
"""Ops of one step; a model with more loops over single elements, or does not end."""


def too_many_ops(limit: int) -> ModelError:
    """Say that a step has too many ops, and where it is."""
    line = next(lines_of_stack(), None)
    where = f"; it is at {line}" if line else ""
    return ModelError(
        f"One training step has more than {limit:,} operators: the model loops over single"
        f" elements in Python, or its loop does not end without data{where}",
        hint="Trace it with a smaller batch or a shorter sequence, or write the loop as one"
        " operator.",
    )
