"""What a statement must read for the program to go on past it."""

import ast
import linecache
from collections.abc import Iterator
from functools import cache


def value_that_goes_on(file: str, line: int) -> bool | None:
    """Return the truth value without which a line raises, None where it says nothing.

    ``assert x.min() > 0`` must read true, ``if x.isnan().any(): raise ...`` must not.

    Args:
        file: Path of the file.
        line: A line of the statement's condition.
    """
    for node in _guards("".join(linecache.getlines(file))):
        if node.test.lineno <= line <= (node.test.end_lineno or node.test.lineno):
            positive = _is_positive(node.test)
            return positive if positive is None or isinstance(node, ast.Assert) else not positive
    return None


@cache
def _guards(text: str) -> tuple[ast.Assert | ast.If, ...]:
    """List the statements that raise on a condition."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return ()
    return tuple(_raising(tree))


def _raising(tree: ast.AST) -> Iterator[ast.Assert | ast.If]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield node
        if isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], ast.Raise):
            yield node


def _is_positive(test: ast.expr) -> bool | None:
    """Tell whether a condition holds where what it reads is true, None where it is mixed."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _is_positive(test.operand)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        signs = {_is_positive(value) for value in test.values}
        return signs.pop() if len(signs) == 1 else None
    return True
