"""Answers to what a model asks of data that the meta device does not have."""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import PurePath
from types import FrameType
from typing import Self, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map, tree_map_only

from .answers import Answers, answered, is_number_in_text, positions_of_rows, unpacked
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


@contextmanager
def _autocast_without_data() -> Iterator[None]:
    """Take ``torch.autocast`` of the meta device, which raises, as that of the CPU.

    It does nothing to tensors without data.
    """
    own = torch.autocast.__init__

    def initialised(self: torch.autocast, device_type: str, *args: Tree, **kwargs: Tree) -> None:
        own(self, "cpu" if device_type == "meta" else device_type, *args, **kwargs)

    torch.autocast.__init__ = initialised  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = own  # type: ignore[method-assign]


class PlannedReads(TorchFunctionMode):
    """Answers what lines of the model read of data that is not there, as planned.

    Functions that the model compiles run as they are written: there is nothing to compile for. So
    does code under autocast for the device of its tensors, where that has none.
    """

    def __init__(self, reads: Sequence[DataRead] = ()) -> None:
        super().__init__()
        self._answers = {(read.file, read.line): Answers(unpacked(read.answers)) for read in reads}
        self._as_written = ExitStack()

    def __enter__(self) -> Self:
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and it takes long to import
            self._as_written.enter_context(torch.compiler.set_stance("force_eager"))
        self._as_written.enter_context(_autocast_without_data())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Tree) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._as_written.close()

    def from_here_again(self) -> Callable[[], None]:
        """Return a function after which lines read what they read from now on once more."""
        given = {place: answers.given for place, answers in self._answers.items()}

        def go_back() -> None:
            for place, answers in self._answers.items():
                answers.given = given[place]

        return go_back

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Answer nothing inside it, where what is compiled is; it is the mode entered last."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def __torch_function__(
        self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        if is_number_in_text(func, args):
            return format(self.__torch_function__(Tensor.item, (), args[:1]), *args[1:])
        return self._run(func, func, args, kwargs or {})

    def _run(self, run: Function, func: Function, args: Args, kwargs: Kwargs) -> Tree:
        """Call what runs a function, and answer where that needs data."""
        if getattr(func, "__name__", "") == "__setitem__":
            args = args[0], positions_of_rows(*args), *args[2:]
        try:
            return run(*args, **kwargs)
        except RuntimeError:  # it needs data
            answers = self._answers_of_line()
            if answers is None:
                raise
            return answered(func, args, kwargs, answers)

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

    Tensors that code makes or brings on the CPU stand beside those of the device, as where that is
    the CPU: they are put on the meta device, their data known.

    It notes how each tensor without a parameter behind it is made, and runs that on the CPU when
    the model asks for its data. What changes a tensor in place makes other data of it; views that
    were taken before are not known any more.
    """

    def __init__(self, on_meta: Tree, real: Tree, reads: Sequence[DataRead] = ()) -> None:
        super().__init__(reads)
        self._known: dict[tuple[int, int], tuple[Tensor, _Made]] = {}
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}
        for tensor, data in zip(tensors_of(on_meta), tensors_of(real), strict=True):
            if not tensor.is_floating_point():
                self._know(tensor, data.detach)

    def __torch_function__(
        self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        if is_number_in_text(func, args):
            return super().__torch_function__(func, types, args)
        args, kwargs = self._on_one_device(args, kwargs or {})
        if getattr(func, "__name__", "") in ("__getitem__", "__setitem__"):
            args = args[0], self._with_positions(args[1]), *args[2:]
        tensors = [tensor for tensor in tensors_of((args, kwargs)) if tensor.is_meta]
        sources = {id(tensor): self._source(tensor, func) for tensor in tensors}
        known = {key: source for key, source in sources.items() if source is not None}
        draws = is_random(func)
        if len(known) < len(sources) or draws:
            output = self._run(functools.partial(run_on_meta, func), func, args, kwargs)
            # What is drawn on the CPU would be read as it is, by each rank as it comes.
            return tree_map_only(Tensor, lambda t: t.to("meta"), output) if draws else output
        made = _MadeOnCpu(func, args, kwargs, known)
        versions = [tensor._version for tensor in tensors]
        try:
            output = func(*args, **kwargs)
        except (RuntimeError, TypeError):  # it needs data
            return tree_map_only(Tensor, self._known_meta, made.output())
        if not tensors_of((args, kwargs)):
            output = tree_map_only(Tensor, self._twin, output)
        for tensor, version in zip(tensors, versions, strict=True):
            if tensor._version != version:
                made.changed.add(id(tensor))
                self._know(tensor, functools.partial(made.left_in, tensor))
        for position, tensor in enumerate(tensors_of(output)):
            if tensor.is_meta and self._key(tensor) not in self._known:
                self._know(tensor, functools.partial(made.tensor, position))
        return output

    def _on_one_device(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Put tensors with data on the meta device where others of a call are there."""
        places = {tensor.is_meta for tensor in tensors_of((args, kwargs))}
        if len(places) < 2:
            return args, kwargs
        both: tuple[Args, Kwargs] = tree_map_only(Tensor, self._twin, (args, kwargs))
        return both

    def _twin(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the meta device for one with data, single numbers as they are."""
        if type(tensor) is not Tensor or tensor.is_meta or not tensor.dim():
            return tensor
        if id(tensor) not in self._twins:  # kept, so that no other gets its id
            self._twins[id(tensor)] = tensor, self._known_meta(tensor)
        return self._twins[id(tensor)][1]

    @staticmethod
    def _key(tensor: Tensor) -> tuple[int, int]:
        return id(tensor), tensor._version

    def _source(self, tensor: Tensor, func: Function) -> "_Made | None":
        """Return what makes the data that a function reads of a tensor, None where none does."""
        known = self._known.get(self._key(tensor))
        if known is None and getattr(func, "__name__", "") in _SHAPE_ONLY:
            return lambda: torch.empty((), dtype=tensor.dtype).expand(tensor.shape)
        return None if known is None else known[1]

    def _know(self, tensor: Tensor, data: "_Made") -> None:
        # The tensor is kept so that no other gets its id.
        self._known[self._key(tensor)] = tensor, data

    def _known_meta(self, data: Tensor) -> Tensor:
        tensor = data.to("meta")
        self._know(tensor, lambda: data)
        return tensor

    def _with_positions(self, index: Tree) -> Tree:
        """Say by positions what masks with known data choose, of whatever tensor."""
        places: list[Tree] = []
        for each in index if isinstance(index, tuple) else (index,):
            is_mask = isinstance(each, Tensor) and each.is_meta and each.dtype is torch.bool
            known = self._known.get(self._key(each)) if is_mask else None
            if known is None:
                places.append(each)
            else:
                chosen = known[1]().nonzero(as_tuple=True)
                places += [self._known_meta(positions) for positions in chosen]
        return tuple(places) if isinstance(index, tuple) or len(places) != 1 else places[0]


_Made: TypeAlias = Callable[[], Tensor]
"""Makes the data of a tensor on the CPU."""

_SHAPE_ONLY = frozenset(
    {"full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like"}
)
"""Functions whose result has nothing of the data of their input."""


def is_random(func: Function) -> bool:
    """Tell whether a function of torch draws random numbers."""
    return _is_random(getattr(func, "__name__", ""))


@functools.cache
def _is_random(name: str) -> bool:
    ops: Tree = getattr(torch.ops.aten, name, None)
    overloads = ops.overloads() if hasattr(ops, "overloads") else ()
    return any(torch.Tag.nondeterministic_seeded in getattr(ops, name).tags for name in overloads)


class _MadeOnCpu:
    """A function of known tensors, run on the CPU once where its data is asked for."""

    def __init__(
        self, func: Function, args: Args, kwargs: Kwargs, sources: Mapping[int, _Made]
    ) -> None:
        self._func = func
        self._arguments = args, kwargs
        self._sources = sources
        self._done: tuple[Tree, Mapping[int, Tensor]] | None = None
        self.changed: set[int] = set()
        """Ids of arguments that the function changes in place."""

    def output(self) -> Tree:
        """Return what the function returns."""
        return self._run()[0]

    def tensor(self, position: int) -> Tensor:
        """Return one of the tensors of that."""
        return tensors_of(self.output())[position]

    def left_in(self, argument: Tensor) -> Tensor:
        """Return what the function leaves in one of its arguments."""
        return self._run()[1][id(argument)]

    def _run(self) -> tuple[Tree, Mapping[int, Tensor]]:
        if self._done is None:
            data = {key: made() for key, made in self._sources.items()}
            data |= {key: data[key].clone() for key in self.changed}

            def on_cpu(leaf: Tree) -> Tree:
                if isinstance(leaf, torch.device):
                    return torch.device("cpu")
                return data.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf

            args, kwargs = tree_map(on_cpu, self._arguments)
            self._done = self._func(*args, **kwargs), data
        return self._done
