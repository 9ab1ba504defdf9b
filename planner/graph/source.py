"""Finding the user's own line in a stack or a traceback."""

import linecache
import sys
import traceback
from pathlib import Path
from types import FrameType, TracebackType

import torch

_OWN_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).resolve().parent.parent))
"""Folders of torch and of this package."""

_STANDARD_LIBRARY = str(Path(traceback.__file__).parent)


def _is_user_file(file: str) -> bool:
    if file.startswith("<") or file.startswith(_OWN_FOLDERS):
        return False
    return "site-packages" in file or not file.startswith(_STANDARD_LIBRARY)


def _spell(file: str, line: int) -> str:
    text = linecache.getline(file, line).strip()
    return f"{file}:{line}: {text}" if text else f"{file}:{line}"


def line_of_traceback(trace: TracebackType | None) -> str:
    """Spell the deepest user line of a traceback as "file:line: code", "" where there is none."""
    found = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if _is_user_file(file):
            found = _spell(file, trace.tb_lineno)
        trace = trace.tb_next
    return found


def line_of_stack() -> str:
    """Spell the user line that runs now as "file:line: code", "" where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if _is_user_file(file):
            return _spell(file, frame.f_lineno)
        frame = frame.f_back
    return ""
