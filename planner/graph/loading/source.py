"""The user's own code: which of its lines runs now, and what a line must read to go on."""

import ast
import linecache
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType

import torch

_PACKAGE = Path(__file__).resolve().parents[2]
_OWN_FOLDERS = (str(Path(torch.__file__).parent), str(_PACKAGE))
"""Folders of torch and of this package."""

_RUNNING_FOLDERS = tuple(str(_PACKAGE / name) for name in ("graph", "runtime"))
"""Those of this package that run the user's code: what calls the others is no code of the model."""

_LONGEST_CODE = 70
"""Letters of a line that are quoted."""

_STANDARD_LIBRARY = str(Path(traceback.__file__).parent)


def _is_user_file(file: str) -> bool:
    if file.startswith("<") or file.startswith(_OWN_FOLDERS):
        return False
    return "site-packages" in file or not file.startswith(_STANDARD_LIBRARY)


@dataclass(frozen=True, slots=True)
class UserLine:
    """A line of the user's code."""

    file: str
    """Path of the file."""
    number: int
    """Line, counted from 1."""

    @property
    def text(self) -> str:
        """Its code, "" where the file cannot be read."""
        return linecache.getline(self.file, self.number).strip()

    @property
    def place(self) -> str:
        """The file's name and the line: "model.py:57"."""
        return f"{Path(self.file).name}:{self.number}"

    @property
    def code(self) -> str:
        """Its code in quotes, cut where it is long."""
        text = self.text
        return f"`{text}`" if len(text) <= _LONGEST_CODE else f"`{text[:_LONGEST_CODE]} ...`"

    def __str__(self) -> str:
        place = f"{self.file}:{self.number}"
        return f"{place}: {self.text}" if self.text else place


def line_of_traceback(trace: TracebackType | None) -> str:
    """Spell the deepest user line of a traceback as "file:line: code", "" where there is none."""
    found = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if _is_user_file(file):
            found = str(UserLine(file, trace.tb_lineno))
        trace = trace.tb_next
    return found


def lines_of_stack() -> Iterator[UserLine]:
    """Yield the user's lines that run now, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if _is_user_file(file):
            yield UserLine(file, frame.f_lineno)
        elif file.startswith(str(_PACKAGE)) and not file.startswith(_RUNNING_FOLDERS):
            return
        frame = frame.f_back


def runs_inside(folder: str) -> bool:
    """Tell whether code in a folder runs now, above the user's innermost line."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_user_file(frame.f_code.co_filename):
        if folder in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


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
