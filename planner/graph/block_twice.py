"""Whether a block does the same when it runs again in backward: it runs twice without data.

Recomputation takes a block for a function of what it is handed. One that adds to a list, a dict or
an object that it is handed, or that counts its calls, is none: it finds what it left there itself.
Where that has another shape torch raises in the first step, else gradients are wrong and nothing
says so. All that has a gradient must be made by the same calls, with the same numbers and tensors,
in both runs. What has none may be made once and kept: masks, tables of positions.
"""

from collections.abc import Hashable
from numbers import Number

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from planner.graph.torch_private import tree_leaves
from planner.runtime.known_data import KnownData
from planner.runtime.recompute import as_at_first
from planner.runtime.trees import Args, Function, Kwargs, Tree, tensors_of

_COMPARED = (Number, str, slice, torch.Size, torch.dtype, torch.device, type(None))
"""Types of arguments that are compared by what they say, others by their type."""

_Call = tuple[str, tuple[Hashable, ...]]
"""Name of a function of torch, and its arguments."""


class AnotherRunError(RuntimeError):
    """A block does not do what it did before."""


def prepare_to_run_twice(block: nn.Module, known: KnownData) -> None:
    """Let a block run twice when it is called; the call raises where the runs differ.

    Args:
        block: A block on the meta device.
        known: Answers what it reads of data.
    """
    forward = block.forward

    def twice(*args: Tree, **kwargs: Tree) -> Tree:
        buffers = [name for name, _ in block.named_buffers()]
        runs = as_at_first(block, buffers, forward)
        handed = [(tensor, tensor._version) for tensor in tensors_of((args, kwargs))]
        read_again = known.from_here_again()
        with _Run(block) as first:
            output = runs(*args, **kwargs)
        for tensor, version in handed:
            if tensor._version != version:
                raise AnotherRunError(f"it changes in place {_words(tensor)} that it is handed")
        read_again()
        with _SecondRun(block, first) as second:
            runs(*args, **kwargs)
        second.finish()
        return output

    block.forward = twice


class _Run(TorchFunctionMode):
    """Notes which calls made what has a gradient."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self._block = block
        self._names: dict[int, str] = {}
        self._found: dict[int, tuple[Tensor, Hashable]] = {}
        self._made: dict[int, tuple[Tensor, Hashable]] = {}
        self._shared: dict[Hashable, int] = {}
        self.calls: list[_Call] = []
        """Those whose result has a gradient."""

    def __torch_function__(
        self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        kwargs = kwargs or {}
        if not self._names:  # when it runs again, copies of buffers are in their place by now
            named = (*self._block.named_parameters(), *self._block.named_buffers())
            self._names = {id(tensor): name for name, tensor in named}
        name = getattr(func, "__name__", "")
        call = name, tuple(self._key(leaf) for leaf in tree_leaves((args, kwargs)))
        before = {id(tensor): tensor._version for tensor in tensors_of((args, kwargs))}
        output = func(*args, **kwargs)
        made = [each for each in tensors_of(output) if before.get(id(each)) != each._version]
        source: Hashable = self._shared.setdefault(call, len(self._shared))
        if any(tensor.requires_grad for tensor in made):
            source = "call", len(self.calls)
            self._note(call, args, kwargs)
        for position, tensor in enumerate(made):
            if id(tensor) not in self._names:
                self._made[id(tensor)] = tensor, (source, position)
        return output

    def _note(self, call: _Call, _args: Args, _kwargs: Kwargs) -> None:
        self.calls.append(call)

    def _key(self, leaf: Tree) -> Hashable:
        if isinstance(leaf, Tensor):
            return self._source(leaf)
        return repr(leaf) if isinstance(leaf, _COMPARED) else type(leaf).__qualname__

    def _source(self, tensor: Tensor) -> Hashable:
        """Where a tensor comes from; of one that is not made in this run, when it was met."""
        if id(tensor) in self._names:
            return self._names[id(tensor)]
        if id(tensor) in self._made:
            return self._made[id(tensor)][1]
        met = "met", len(self._found)
        return self._found.setdefault(id(tensor), (tensor, met))[1]


class _SecondRun(_Run):
    """Compares with what a first run noted."""

    def __init__(self, block: nn.Module, first: _Run) -> None:
        super().__init__(block)
        self._first = first
        self._shared = first._shared

    def finish(self) -> None:
        """Check that nothing is left to do.

        Raises:
            AnotherRunError: The first run did more.
        """
        if len(self.calls) < len(self._first.calls):
            left = self._first.calls[len(self.calls)][0]
            raise AnotherRunError(f"it calls {left} the first time only")

    def _note(self, call: _Call, args: Args, kwargs: Kwargs) -> None:
        at = len(self.calls)
        super()._note(call, args, kwargs)
        before = self._first.calls[at] if at < len(self._first.calls) else ("nothing", ())
        if call == before:
            return
        name = call[0]
        for tensor in tensors_of((args, kwargs)):
            if id(tensor) in self._first._made and id(tensor) not in self._made:
                raise AnotherRunError(f"{name} reads {_words(tensor)} that it left there itself")
        if name != before[0]:
            raise AnotherRunError(f"it calls {name} where it called {before[0]} the first time")
        raise AnotherRunError(f"{name} gets other arguments than the first time")

    def _source(self, tensor: Tensor) -> Hashable:
        mine = super()._source(tensor)
        if id(tensor) in self._made:
            return mine
        for known in (self._first._made, self._first._found):
            if id(tensor) in known:
                return known[id(tensor)][1]
        return mine


def _words(tensor: Tensor) -> str:
    return f"a tensor of {tuple(tensor.shape)}"
