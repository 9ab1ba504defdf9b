"""What a model consists of, seen in one forward on the meta device."""

import contextlib
import copy
import functools
from collections import OrderedDict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from .known_data import DataRead, KnownData
from .model import first_names, run_model
from .streams import first_tensor, stream_of
from .trees import Args, Function, Kwargs, Tree, cast_floats, tensors_of

_CONTAINERS = (dict, OrderedDict, set)

Output: TypeAlias = tuple[str, int]
"""A tensor that a module returns: the module's path, and the position among the tensors of its
output in the order of torch's pytree. The module is called once in a forward."""


@dataclass(slots=True, eq=False)
class Sketch:
    """What a tensor of a forward looks like; one object for one tensor."""

    shape: torch.Size
    """Its shape for one microbatch."""
    dtype: torch.dtype
    """Its dtype."""
    requires_grad: bool
    """Whether a gradient flows back through it."""
    is_changed: bool = False
    """Whether the model changes it in place after the module that made it has returned it."""

    def example(self) -> Tensor:
        """Return a meta tensor that looks like it."""
        return torch.empty(
            self.shape, dtype=self.dtype, device="meta", requires_grad=self.requires_grad
        )


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a module in a forward."""

    unit: int
    """Unit that runs when the call returns."""
    output: Tree
    """What it returns, with sketches for its tensors."""
    arguments: tuple[Sketch, ...]
    """The tensors that it gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """What a dry run on the meta device tells about the model."""

    blocks: tuple[str, ...]
    """Module paths of the blocks in execution order."""
    users: Mapping[str, frozenset[int]]
    """Units that use a parameter, by its first name."""
    runs: Mapping[str, frozenset[int]]
    """Units in which a module outside the blocks is called, by its path."""
    calls: Mapping[str, Sequence[Call]]
    """Calls of the blocks and of all modules outside of them, those that contain blocks too, by
    path."""
    first_names: Mapping[str, str]
    """First name of a parameter by each of its names (tied ones have several)."""
    streams: tuple[Sketch, ...]
    """The stream after each unit but the last."""
    twin: nn.Module
    """The model on the meta device."""

    def call(self, output: Output) -> Call:
        """Return the call that makes an output.

        Raises:
            ValueError: There is no such output.
        """
        path, index = output
        calls = self.calls.get(path, ())
        if len(calls) != 1 or index >= len(sketches_of(calls[0])):
            raise ValueError(
                f"STAGES does not fit the model: {path!r} is no module that is called once in a "
                f"forward and returns {index + 1} tensors"
            )
        return calls[0]

    def sketch(self, output: Output) -> Sketch:
        """Return the sketch of an output."""
        return sketches_of(self.call(output))[output[1]]


def sketches_of(call: Call) -> list[Sketch]:
    """Return the sketches of the tensors that a call returns."""
    return [leaf for leaf in tree_leaves(call.output) if isinstance(leaf, Sketch)]


class _DryRun(TorchFunctionMode):
    """Notes of one forward which unit uses a parameter or a module, and what modules return."""

    def __init__(self, blocks: Sequence[str]) -> None:
        super().__init__()
        self.blocks = blocks
        self.unit = 0
        self.users: dict[int, set[int]] = {}
        self.runs: dict[str, set[int]] = {}
        self.calls: dict[str, list[Call]] = {}
        self.streams: list[Sketch] = []
        self._in_block = False
        self._hooks: list[RemovableHandle] = []
        self._arguments: dict[str, tuple[Sketch, ...]] = {}
        self._seen: dict[tuple[int, int], tuple[Tensor, Sketch]] = {}

    def __torch_function__(
        self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) or tensors_of(result):  # reading a shape or dtype is no use
            for value in tensors_of((args, kwargs)):
                if isinstance(value, nn.Parameter):
                    self.users.setdefault(id(value), set()).add(self.unit)
        return result

    def watch(self, twin: nn.Module) -> None:
        """Register hooks on the blocks and on the modules outside of them."""
        for index, path in enumerate(self.blocks):
            block = twin.get_submodule(path)
            enter = functools.partial(self._enter_block, index)
            self._hook(block, enter, functools.partial(self._leave_block, index))
        self.runs = {path: set() for path, _ in outer_modules(twin, self.blocks)}
        blocks = frozenset(self.blocks)
        for path, module in twin.named_modules():
            if path and not lies_in_any(path, blocks):
                enter = functools.partial(self._enter, path)
                self._hook(module, enter, functools.partial(self._leave, path))

    def _hook(self, module: nn.Module, enter: Function, leave: Function) -> None:
        self._hooks += (
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave),
        )

    def finish(self) -> None:
        """Note which tensors were changed after they had been returned, and remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        for (_, version), (tensor, sketch) in self._seen.items():
            sketch.is_changed = tensor._version != version

    def _enter_block(self, index: int, block: nn.Module, args: Args, kwargs: Kwargs) -> None:
        path = self.blocks[index]
        if index != len(self.streams):
            raise ValueError(f"BLOCKS is not in execution order: {path} runs earlier")
        self.unit = index + 1
        self._enter(path, block, args, kwargs)
        self._in_block = True
        self.streams.append(self._sketch(stream_of(args, kwargs)))

    def _leave_block(self, index: int, block: nn.Module, args: Args, output: Tree) -> None:
        self._in_block = False
        self._leave(self.blocks[index], block, args, output)
        if index == len(self.blocks) - 1:
            self.unit += 1
            self.streams.append(self._sketch(first_tensor(output)))

    def _enter(self, path: str, _: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if path in self.runs:
            self.runs[path].add(self.unit)
        if not self._in_block:
            self._arguments[path] = tuple(self._sketch(t) for t in tensors_of((args, kwargs)))

    def _leave(self, path: str, _: nn.Module, __: Args, output: Tree) -> None:
        if self._in_block:
            return
        sketches = tree_map_only(Tensor, self._sketch, output)
        call = Call(self.unit, sketches, self._arguments.pop(path))
        self.calls.setdefault(path, []).append(call)

    def _sketch(self, tensor: Tensor) -> Sketch:
        sketch = Sketch(tensor.shape, tensor.dtype, tensor.requires_grad)
        # The tensor is kept so that no other gets its id; after a change in place it is another.
        return self._seen.setdefault((id(tensor), tensor._version), (tensor, sketch))[1]


def examine(
    model: nn.Module,
    blocks: Sequence[str],
    microbatch: Tree,
    dtype: torch.dtype,
    reads: Sequence[DataRead] = (),
) -> Anatomy:
    """Run the model once on the meta device and note what runs where.

    Args:
        model: The whole model; it is not changed.
        blocks: Module paths of the blocks in execution order.
        microbatch: Inputs of one microbatch.
        dtype: Compute dtype.
        reads: What the model's code reads from tensors without data.

    Raises:
        ValueError: The blocks do not run in this order.
    """
    twin = meta_twin(model, dtype)
    run = _DryRun(blocks)
    run.watch(twin)
    with run:
        run_on_meta(twin, microbatch, dtype, reads)
    run.finish()

    users = {
        name: frozenset(run.users.get(id(parameter), {0}))
        for name, parameter in twin.named_parameters()
    }
    return Anatomy(
        blocks=tuple(blocks),
        users=users,
        runs={path: frozenset(units) for path, units in run.runs.items()},
        calls=run.calls,
        first_names=first_names(twin),
        streams=tuple(run.streams),
        twin=twin,
    )


def run_on_meta(
    twin: nn.Module, microbatch: Tree, dtype: torch.dtype, reads: Sequence[DataRead]
) -> None:
    """Run a model's ``meta_twin`` on inputs without data; arguments as for ``examine``."""
    inputs = cast_floats(tree_map_only(Tensor, lambda t: t.to("meta"), microbatch), dtype)
    with KnownData(inputs, microbatch, reads):
        run_model(twin, inputs)


def outer_modules(model: nn.Module, blocks: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of all modules that neither lie in a block nor contain one."""
    inside = frozenset(blocks)
    around = {path for block in blocks for path in _paths_around(block)}
    for path, module in model.named_modules():
        if path and path not in around and not lies_in_any(path, inside):
            yield path, module


def _paths_around(path: str) -> list[str]:
    """Paths of the modules that contain a module, but the root's."""
    names = path.split(".")
    return [".".join(names[:end]) for end in range(1, len(names))]


def lies_in_any(path: str, blocks: Container[str]) -> bool:
    """Say whether a module is one of the blocks or lies in one."""
    return path in blocks or any(around in blocks for around in _paths_around(path))


def meta_twin(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Copy a model to the meta device, its floating-point parameters in a dtype."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        floating = parameter.is_floating_point()
        data = parameter.detach().to("meta", dtype if floating else None)
        memo[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    memo |= {id(kept): kept.detach().to("meta") for kept in _results(model)}
    return copied(model, memo)


def copied(model: nn.Module, copies: dict[int, Any]) -> nn.Module:
    """Copy a model with the functions in it, hooks say, that hold the model or parts of it.

    ``copy.deepcopy`` alone takes functions as they are: those of a copy would work on the original.
    And it refuses results of ops that modules keep (a weight that a hook makes of others, what a
    forward has left in a list): they go along as what they are.

    Args:
        model: What to copy.
        copies: What stands for some of its tensors and modules, by identity, and is taken as it is;
            gets the other copies.
    """
    stand_ins = [each for each in copies.values() if isinstance(each, nn.Module)]
    for kept in _results(model, copies):
        copies.setdefault(id(kept), kept.detach())
    for empty in _empty(model):  # most of what modules hold, and slow to copy
        copies.setdefault(id(empty), type(empty)())
    twin = copy.deepcopy(model, copies)
    for module in (*stand_ins, *modules_outside(twin, {id(each) for each in stand_ins})):
        own = vars(module)
        for holder in (own, *(each for each in own.values() if isinstance(each, dict))):
            for key, value in holder.items():
                if isinstance(value, FunctionType) and value.__closure__:
                    holder[key] = _with_copies(value, copies)
    return twin


def modules_outside(root: nn.Module, without: Container[int]) -> Iterator[nn.Module]:
    """Yield a module and all in it, each once, but those of some ids and what lies in these."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if id(module) not in seen and id(module) not in without:
            seen.add(id(module))
            yield module
            waiting += (child for child in module._modules.values() if child is not None)


def _empty(model: nn.Module) -> Iterator[Any]:
    """Yield the empty containers that modules hold, which stay so in a copy."""
    for module in model.modules():
        held = vars(module).values()
        yield from (each for each in held if type(each) in _CONTAINERS and not each)


def _results(model: nn.Module, without: Container[int] = ()) -> list[Tensor]:
    """Results of ops that modules keep in attributes, which are no parameters or buffers."""
    return [tensor for tensor in tensors_of(kept_by(model, without)) if tensor.grad_fn is not None]


def kept_by(model: nn.Module, without: Container[int] = ()) -> list[Tree]:
    """What modules keep in attributes that torch does not know of, and their hooks by closure.

    Modules with some ids are left out, with what lies in them.
    """
    kept: list[Tree] = []
    for module in modules_outside(model, without):
        kept += [value for name, value in vars(module).items() if not name.startswith("_")]
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            for cell in getattr(hook, "__closure__", None) or ():
                with contextlib.suppress(ValueError):  # nothing is in it yet
                    kept.append(cell.cell_contents)
    return kept


def _with_copies(function: FunctionType, copies: Mapping[int, Any]) -> FunctionType:
    """Return a function that holds copies of what it holds, itself where there are none."""
    cells = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # nothing is in it yet
            if id(cell.cell_contents) in copies:
                cell = CellType(copies[id(cell.cell_contents)])
        cells.append(cell)
    if tuple(cells) == function.__closure__:
        return function
    new = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(cells),
    )
    new.__kwdefaults__ = function.__kwdefaults__
    return new


def check_sequence(anatomy: Anatomy, size: int, sequence_dim: int) -> None:
    """Check that the stream flows from block to block and splits evenly over ranks.

    Args:
        anatomy: What the model consists of.
        size: Ranks over which the stream is split.
        sequence_dim: Dim of the stream that is split.

    Raises:
        ValueError: It does not or cannot.
    """
    for path, stream in zip(anatomy.blocks, anatomy.streams[1:], strict=True):
        if anatomy.sketch((path, 0)) is not stream:
            raise ValueError(
                f"splitting the sequence needs blocks that hand one tensor to the next, but {path} "
                "does not: plan without sequence_parallel and cp"
            )
    for stream in anatomy.streams:
        if stream.shape[sequence_dim] % size:
            raise ValueError(
                f"the plan splits dim {sequence_dim} of {tuple(stream.shape)} over "
                f"{size} ranks: the sequence length must be a multiple of {size}"
            )
