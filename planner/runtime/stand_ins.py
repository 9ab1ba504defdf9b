"""What takes the place of modules that other pipeline stages hold."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .anatomy import Call, Sketch, sketches_of
from .streams import stream_of
from .trees import Args, Kwargs, Tree, tensors_of


class StreamEnd(Exception):  # noqa: N818 - no error: it ends the forward of a stage
    """Carries the stream out of the user's forward at the end of a stage."""

    def __init__(self, stream: Tensor) -> None:
        super().__init__()
        self.stream = stream


class StandIn(nn.Module):
    """Takes the place of a module that another stage holds.

    It keeps type, methods, attributes and submodules, which the model's code may look at; zeros
    that take no memory stand for the parameters.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        known = set(self.__dict__)
        plain = {k: v for k, v in original.__dict__.items() if k not in known and k != "forward"}
        self.__dict__.update(plain)
        self.__dict__.update(_hollow(original))
        name = type(self).__name__ + type(original).__name__
        self.__class__ = type(name, (type(self), type(original)), {})


def _hollow(module: nn.Module) -> dict[str, Any]:
    """Return parameters, buffers and submodules of a copy that has zeros for its parameters."""
    own = {name: p for name, p in module._parameters.items() if p is not None}
    zeros = {
        name: unbacked_zeros(parameter, torch.device("cpu")) for name, parameter in own.items()
    }
    children: dict[str, nn.Module | None] = {}
    for name, child in module._modules.items():
        children[name] = None if child is None else type(child).__new__(type(child))
        if child is not None:
            children[name].__dict__.update({**child.__dict__, **_hollow(child)})
    return {
        "_parameters": {},
        "_buffers": {**module._buffers, **zeros},
        "_non_persistent_buffers_set": {*module._non_persistent_buffers_set, *zeros},
        "_modules": children,
    }


class StoppingBlock(StandIn):
    """The first block of the next stage: ends this stage's forward with the stream."""

    def forward(self, *args: Tree, **kwargs: Tree) -> NoReturn:
        """End the stage."""
        raise StreamEnd(stream_of(args, kwargs))


class AbsentModule(StandIn):
    """A module of a later stage."""

    def forward(self, *_args: Tree, **_kwargs: Tree) -> NoReturn:
        """Refuse: the cut is not legal."""
        raise RuntimeError("a module of a later pipeline stage was called: the cut is not legal")


class EarlierModule(StandIn):
    """A block or another module of an earlier stage: returns zeros of what it returned there.

    The zeros take no memory (they are expanded from one element), unless the model writes into
    them. What the module hands on unchanged (a mask, say) is handed on here too. Where it gets
    other sizes than in the dry run (the rows of a mask, which data decide), so are those that it
    returns.
    """

    def __init__(self, original: nn.Module, calls: Sequence[Call], twin: nn.Module) -> None:
        super().__init__(original)
        self._calls = calls
        self._listeners = [
            (hook, key in original._forward_hooks_with_kwargs)
            for key, hook in original._forward_hooks.items()
        ]
        self._sizes_of = twin.forward  # a bound method: the twin is no submodule
        self._next_call = 0
        self._zeros: dict[Sketch, Tensor] = {}
        self.allocate(torch.device("cpu"))

    def allocate(self, device: torch.device) -> None:
        """Make the zeros, one tensor for each that the module returned."""
        self._device = device
        for call in self._calls:
            for sketch in sketches_of(call):
                self._zeros[sketch] = unbacked_zeros(sketch, device)

    def tell_listeners(self) -> None:
        """Let the user's forward hooks see what the hooks that are registered now leave.

        They may keep it for code that runs here, at a place in a list, say. What they return the
        received tensor has been through already.
        """
        if self._listeners:
            self.register_forward_hook(self._tell, with_kwargs=True)

    def _tell(self, module: nn.Module, args: Args, kwargs: Kwargs, output: Tree) -> None:
        for hook, takes_kwargs in self._listeners:
            hook(module, args, kwargs, output) if takes_kwargs else hook(module, args, output)

    def restart(self) -> None:
        """Begin a forward of the model."""
        self._next_call = 0

    def forward(self, *args: Tree, **kwargs: Tree) -> Tree:
        """Return zeros like what the module returned, and hand on what it hands on."""
        call = self._calls[self._next_call % len(self._calls)]  # the model may recompute by itself
        self._next_call += 1
        handed_on = dict(zip(call.arguments, tensors_of((args, kwargs)), strict=True))
        if any(sketch.shape != tensor.shape for sketch, tensor in handed_on.items()):
            return self._of_other_sizes(args, kwargs)

        def returned(sketch: Sketch) -> Tensor:
            if sketch in handed_on:
                return handed_on[sketch]
            zeros = self._zeros[sketch]
            return torch.zeros_like(zeros).contiguous() if sketch.is_changed else zeros

        return tree_map_only(Sketch, returned, call.output)

    def _of_other_sizes(self, args: Args, kwargs: Kwargs) -> Tree:
        """Return what the module would, of the sizes that it has on the meta device."""
        given = tensors_of((args, kwargs))
        on_meta = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in given]
        place = {id(tensor): meta for tensor, meta in zip(given, on_meta, strict=True)}
        back = {id(meta): tensor for tensor, meta in zip(given, on_meta, strict=True)}
        args, kwargs = tree_map_only(Tensor, lambda tensor: place[id(tensor)], (args, kwargs))
        with torch.no_grad():
            output = self._sizes_of(*args, **kwargs)

        def returned(tensor: Tensor) -> Tensor:
            if id(tensor) in back:
                return back[id(tensor)]
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=self._device)

        return tree_map_only(Tensor, returned, output)


def unbacked_zeros(like: Tensor | Sketch, device: torch.device) -> Tensor:
    """Return zeros of a tensor's shape that take the memory of one element."""
    return torch.zeros((), dtype=like.dtype, device=device).expand(like.shape)


def replace_modules(root: nn.Module, by_path: Mapping[str, nn.Module]) -> None:
    """Replace the modules of some paths under all of their names."""
    new = {id(root.get_submodule(path)): module for path, module in by_path.items()}
    for parent in list(root.modules()):
        for name, child in parent._modules.items():
            if id(child) in new:
                parent._modules[name] = new[id(child)]
