"""Copies of the user's code, and whether it looks for what lies beside it, which they lack."""

import ast
from pathlib import Path

COPIES_FOLDER = "model"
"""Folder beside a script that holds them."""


def asks_for_its_place(tree: ast.AST) -> bool:
    """Say whether a source names ``__file__``."""
    return any(isinstance(node, ast.Name) and node.id == "__file__" for node in ast.walk(tree))


def original_named_by(script: Path) -> Path | None:
    """Find where a script takes the model file from while it is there, None where from copies.

    It names that place, seen from its own, as ``original`` of its model.
    """
    tree = ast.parse(script.read_text(encoding="utf-8"))
    named = [n.value for n in ast.walk(tree) if isinstance(n, ast.keyword) and n.arg == "original"]
    paths = [
        part.value
        for value in named
        for part in ast.walk(value)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]
    return script.resolve().parent / paths[0] if paths else None
