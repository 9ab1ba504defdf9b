"""Finding the user's own line in a stack or a traceback."""

import linecache
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

import torch

_OWN_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).resolve().parents[2]))
"""Folders of torch and of this package."""

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
        frame = frame.f_back


def runs_inside(folder: str) -> bool:
    """Tell whether code in a folder runs now, above the user's innermost line."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_user_file(frame.f_code.co_filename):
        if folder in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
