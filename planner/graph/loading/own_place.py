"""Copies of the user's code, and whether it looks for what lies beside it, which they lack."""

import ast

COPIES_FOLDER = "model"
"""Folder beside a script that holds them."""


def asks_for_its_place(tree: ast.AST) -> bool:
    """Say whether a source names ``__file__``."""
    return any(isinstance(node, ast.Name) and node.id == "__file__" for node in ast.walk(tree))
