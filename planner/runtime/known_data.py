"""Answers to what a model asks of data that the meta device does not have."""

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from types import FrameType

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map, tree_map_only

from .trees import Args, Function, Kwargs, Tree, cast_floats, tensors_of

_GROUPED_PRODUCTS = frozenset({"grouped_mm", "_grouped_mm"})
"""Functions of torch that multiply the tokens of each expert by its own weight."""


def run_on_meta(func: Function, *args: Tree, **kwargs: Tree) -> Tree:
    """Run a function, also where the meta device has no kernel for it or one of other dtypes."""
    name = getattr(func, "__name__", "")
    if name == "ctc_loss" and args[0].is_meta:
        return args[0].sum()
    if name in _GROUPED_PRODUCTS:  # they take bfloat16 only
        return func(*cast_floats(args, torch.bfloat16), **kwargs).to(args[0].dtype)
    return func(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class DataRead:
    """What a line of the model's code reads from tensors that have data in training only."""

    file: str
    """Name of its file, without folders."""
    line: int
    """Line, counted from 1."""
    answers: tuple[tuple[float, int], ...]
    """Each number (of elements, where it chooses some) that it reads in one forward pass, and how
    often in a row."""


class PlannedReads(TorchFunctionMode):
    """Answers what lines of the model read of data that is not there, as planned."""

    def __init__(self, reads: Sequence[DataRead] = ()) -> None:
        super().__init__()
        self._answers = {
            (read.file, read.line): itertools.cycle(_unpacked(read.answers)) for read in reads
        }

    def __torch_function__(
        self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        return self._run(func, func, args, kwargs or {})

    def _run(self, run: Function, func: Function, args: Args, kwargs: Kwargs) -> Tree:
        """Call what runs a function, and answer where that needs data."""
        try:
            return run(*args, **kwargs)
        except RuntimeError:  # it needs data
            answers = self._answers_of_line()
            if answers is None:
                raise
            return _answered(func, args, kwargs, answers)

    def _answers_of_line(self) -> Iterator[float] | None:
        """Return what the innermost line that runs now and has answers reads."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            place = PurePath(frame.f_code.co_filename).name, frame.f_lineno
            if place in self._answers:
                return self._answers[place]
            frame = frame.f_back
        return None


class KnownData(PlannedReads):
    """Answers what a model asks of data on the meta device: by constants and inputs, or as planned.

    It notes how each tensor without a parameter behind it is made, and runs that on the CPU when
    the model branches on it. A tensor that was changed in place is not known any more.
    """

    def __init__(self, on_meta: Tree, real: Tree, reads: Sequence[DataRead] = ()) -> None:
        super().__init__(reads)
        self._known: dict[tuple[int, int], tuple[Tensor, Callable[[], Tensor]]] = {}
        for tensor, data in zip(tensors_of(on_meta), tensors_of(real), strict=True):
            if not tensor.is_floating_point():
                self._know(tensor, data.detach)

    def __torch_function__(
        self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        kwargs = kwargs or {}
        if any(t.is_meta and self._key(t) not in self._known for t in tensors_of((args, kwargs))):
            return self._run(functools.partial(run_on_meta, func), func, args, kwargs)
        on_cpu = functools.cache(lambda: self._run_on_cpu(func, args, kwargs))
        try:
            output = func(*args, **kwargs)
        except RuntimeError:  # it needs data
            return tree_map_only(Tensor, self._known_meta, on_cpu())
        for position, tensor in enumerate(tensors_of(output)):
            if tensor.is_meta:
                made = functools.partial(lambda i: tensors_of(on_cpu())[i], position)
                self._known.setdefault(self._key(tensor), (tensor, made))
        return output

    @staticmethod
    def _key(tensor: Tensor) -> tuple[int, int]:
        return id(tensor), tensor._version

    def _know(self, tensor: Tensor, data: Callable[[], Tensor]) -> None:
        # The tensor is kept so that no other gets its id.
        self._known[self._key(tensor)] = tensor, data

    def _known_meta(self, data: Tensor) -> Tensor:
        tensor = data.to("meta")
        self._know(tensor, lambda: data)
        return tensor

    def _run_on_cpu(self, func: Function, args: Args, kwargs: Kwargs) -> Tree:
        def on_cpu(leaf: Tree) -> Tree:
            if isinstance(leaf, torch.device):
                return torch.device("cpu")
            is_meta = isinstance(leaf, Tensor) and leaf.is_meta
            return self._known[self._key(leaf)][1]() if is_meta else leaf

        cpu_args, cpu_kwargs = tree_map(on_cpu, (args, kwargs))
        return func(*cpu_args, **cpu_kwargs)


NUMBER_READS: Mapping[str, Callable[[float], object]] = {
    "__bool__": bool,
    "is_nonzero": bool,
    "equal": bool,
    "__int__": int,
    "__index__": int,
    "__float__": float,
}
"""Functions that read one number, and its type."""


def _unpacked(answers: Sequence[tuple[float, int]]) -> list[float]:
    return [value for value, times in answers for _ in range(times)]


def _answered(func: Function, args: Args, kwargs: Kwargs, answers: Iterator[float]) -> Tree:
    """Return what a function gives that reads data, from the next answers of its line.

    Raises:
        RuntimeError: It is no function whose result the answers tell.
    """
    name, source = getattr(func, "__name__", ""), args[0]
    if name in NUMBER_READS:
        return NUMBER_READS[name](next(answers))
    if name == "item":
        answer = next(answers)
        if source.dtype is torch.bool:
            return bool(answer)
        return answer if source.is_floating_point() else int(answer)
    if name in ("nonzero", "where") and len(args) + len(kwargs) - ("as_tuple" in kwargs) == 1:
        size = int(next(answers))
        if name == "where" or kwargs.get("as_tuple"):
            return _positions(size, source, source.dim())
        return torch.empty((size, source.dim()), dtype=torch.long, device=source.device)
    if name == "masked_select":
        return torch.empty(int(next(answers)), dtype=source.dtype, device=source.device)
    if name == "__getitem__":
        places: list[Tree] = []
        for index in args[1] if isinstance(args[1], tuple) else (args[1],):
            is_mask = isinstance(index, Tensor) and index.dtype is torch.bool
            places += _positions(int(next(answers)), index, index.dim()) if is_mask else [index]
        return func(source, tuple(places))
    raise RuntimeError(f"{name} reads data that neither the plan nor the model's inputs tell")


def _positions(size: int, of: Tensor, dims: int) -> tuple[Tensor, ...]:
    return tuple(torch.empty(size, dtype=torch.long, device=of.device) for _ in range(dims))
