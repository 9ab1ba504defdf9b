"""Whether code looks for what lies beside it, so that a copy of it elsewhere may not find it."""

import ast


def asks_for_its_place(tree: ast.AST) -> bool:
    """Say whether a source names ``__file__``."""
    return any(isinstance(node, ast.Name) and node.id == "__file__" for node in ast.walk(tree))
