"""What a model reads of data that its inputs and constants tell, noted for a run without data.

Masks that are all true, positions in a row: a model asks for them to take a shorter way, which a
step on fake tensors must take too.
"""

import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path, PurePath

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from planner.runtime.answers import NUMBER_READS
from planner.runtime.known_data import DataRead, KnownData
from planner.runtime.trees import Args, Function, Kwargs, Tree

_TORCH = str(Path(torch.__file__).parent)

_COUNTED = frozenset({"nonzero", "masked_select"})
"""Functions whose result is as long as there are elements that it chooses."""


class NotedReads(KnownData):
    """Notes what each line reads that the inputs and constants of a model on meta tell."""

    def __init__(self, on_meta: Tree, real: Tree, reads: Sequence[DataRead]) -> None:
        """Begin with what is known; arguments as for ``KnownData``."""
        super().__init__(on_meta, real, reads)
        self._noted: dict[tuple[str, int], list[float]] = {}

    def __torch_function__(
        self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        """Run a function and note the number, or the number of elements, that it read."""
        output = super().__torch_function__(func, types, args, kwargs)
        answers = _answers(getattr(func, "__name__", ""), args, output)
        if answers:
            self._noted.setdefault(_line(), []).extend(answers)
        return output

    @property
    def noted(self) -> list[DataRead]:
        """What was read, by line."""
        return [
            DataRead(file, line, tuple((value, len(list(run))) for value, run in groupby(answers)))
            for (file, line), answers in self._noted.items()
        ]


def _answers(name: str, args: Iterable[Tree], output: Tree) -> list[float]:
    """Return what ``PlannedReads`` must know of a read of data; nothing for other functions."""
    if name in NUMBER_READS or name == "item":
        return [float(output)]
    if name == "tolist":
        return [float(number) for number in tree_leaves(output)]
    if name in _COUNTED and isinstance(output, Tensor):
        return [float(output.shape[0])]
    if name == "where" and isinstance(output, tuple):
        return [float(output[0].shape[0])]
    if name == "__getitem__":
        _, index = args
        if isinstance(index, Tensor) and index.dtype is torch.bool:
            return [float(output.shape[0])]
    return []


def _line() -> tuple[str, int]:
    """Return file and line of the innermost code outside of torch that runs now."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename.startswith(_TORCH) and frame.f_back is not None:
        frame = frame.f_back
    return PurePath(frame.f_code.co_filename).name, frame.f_lineno
