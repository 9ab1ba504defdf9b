"""Running code that names its device on another one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from planner.graph import torch_private
from planner.graph.loading.packed_sequences import packing, padding
from planner.graph.loading.stray_tensors import StrayTensors

_Result = Any
"""What a function of torch takes or returns."""

_CPU = torch.device("cpu")

_LITERALS = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
"""Functions that make tensors from the data of Python."""


def names_accelerator(device: object) -> bool:
    """Tell whether an argument names a device that has data, other than the CPU."""
    if isinstance(device, int) and not isinstance(device, bool):
        return True
    if isinstance(device, str):
        return device.partition(":")[0] not in ("cpu", "meta")
    return isinstance(device, torch.device) and device.type not in ("cpu", "meta")


class DeviceMode(TorchFunctionMode):
    """Takes accelerators that code names (``.cuda()``, ``device="cuda"``) for another device."""

    def __init__(self, device: str) -> None:
        """Choose the device.

        Args:
            device: Stands for every accelerator; new tensors are made there where no device is
                named.
        """
        super().__init__()
        self.device = torch.device(device)
        self.factories = torch_private.device_constructors()
        self._special: dict[Callable[..., Any], Callable[..., Any]] = {
            Tensor.cuda: self._move,
            Tensor.pin_memory: lambda tensor, *_, **__: tensor,
        }

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> _Result:
        """Call a function with another device."""
        kwargs = kwargs or {}
        special = self._special.get(func)
        if special is not None:
            return special(*args, **kwargs)
        if func in self.factories:
            kwargs = {**kwargs, "device": self._stands_for(kwargs.get("device"))}
        elif func is Tensor.to:
            args = tuple([self._instead(argument) for argument in args])
        if kwargs and names_accelerator(kwargs.get("device")):
            kwargs = {**kwargs, "device": self.device}
        return func(*args, **kwargs)

    def _stands_for(self, device: _Result) -> _Result:
        return self.device if device is None or names_accelerator(device) else device

    def _instead(self, argument: _Result) -> _Result:
        is_device = isinstance(argument, (str, torch.device))
        return self.device if is_device and names_accelerator(argument) else argument

    def _move(self, tensor: Tensor, *_: _Result, **__: _Result) -> Tensor:
        return tensor.to(self.device)


class TracingMode(DeviceMode):
    """Runs a forward pass on the meta device; data that Python takes is asked for."""

    def __init__(self, read: Callable[[Tensor, str], Tensor]) -> None:
        """Choose who knows the data.

        Args:
            read: Returns the data of a tensor; gets the name of the function that wants it.
        """
        super().__init__("meta")
        self.strays = StrayTensors()
        self._read = read
        self._special |= {
            torch.tensor: self._literal(torch.tensor),
            torch.as_tensor: self._literal(torch.as_tensor),
            torch.asarray: self._literal(torch.asarray),
            Tensor.new_tensor: self._new_tensor,
            Tensor.__getitem__: lambda tensor, index: tensor[_with_literals(index)],
            Tensor.tolist: self._taken(Tensor.tolist),
            Tensor.numpy: self._taken(Tensor.numpy),
            Tensor.__array__: self._taken(Tensor.__array__),
            Tensor.__format__: self._formatted,
            torch_private.pack_padded_sequence: packing(self._real),
            torch_private.pad_packed_sequence: padding(self._real),
        }

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> _Result:
        """Call a function on the meta device, and follow what would lie on the host."""
        result = super().__torch_function__(func, types, args, kwargs)
        if func not in self.factories:
            self.strays.used(func, args, kwargs or {}, result)
        elif func not in _LITERALS and (kwargs or {}).get("device") is None:
            self.strays.made(result)
        return result

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Work in backward too, where torch switches function modes off.

        Checkpoints run code of the model there.
        """
        places: list[tuple[_Result, str]] = [
            (Tensor, name) for name in ("cuda", "numpy", "pin_memory", "to", "tolist")
        ]
        places += [
            (torch, make.__name__)
            for make in self.factories
            if getattr(torch, make.__name__, None) is make
        ]
        with ExitStack() as stack:
            for owner, name in places:
                call = getattr(owner, name)
                if name in vars(owner):
                    stack.callback(setattr, owner, name, call)
                else:
                    stack.callback(delattr, owner, name)
                setattr(owner, name, self._calling(call))
            yield

    def _calling(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: _Result, **kwargs: _Result) -> _Result:
            if torch_private.are_modes_disabled():
                return call(*args, **kwargs)
            return self.__torch_function__(call, (), args, kwargs)

        return called

    def _taken(self, take: Callable[..., Any]) -> Callable[..., Any]:
        """Let Python take the data of a tensor."""

        def taken(tensor: Tensor, *args: _Result, **kwargs: _Result) -> _Result:
            real = self._real(tensor, take.__name__)
            with torch_private.modes_disabled():
                return take(real, *args, **kwargs)

        return taken

    def _real(self, tensor: Tensor, name: str) -> Tensor:
        return self._read(tensor, name) if tensor.is_meta else tensor

    def _literal(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Make literals where they keep their data; the recorder gives them a twin."""

        def literal(data: object, *args: _Result, **kwargs: _Result) -> Tensor:
            if isinstance(data, Tensor):
                kwargs = {**kwargs, "device": self._stands_for(kwargs.get("device"))}
                return make(data, *args, **kwargs)
            return make(data, *args, **{**kwargs, "device": _CPU})

        return literal

    def _formatted(self, tensor: Tensor, spec: str) -> str:
        """Write a tensor into text; whole numbers are read, since names are made of them."""
        if tensor.dim() == 0 and not tensor.is_floating_point():
            real = self._real(tensor, "format")
            with torch_private.modes_disabled():
                return format(real.item(), spec)
        return format(float("nan"), spec) if spec else repr(tensor)

    def _new_tensor(
        self, tensor: Tensor, data: object, *, dtype: torch.dtype | None = None, **others: _Result
    ) -> Tensor:
        others["device"] = None if isinstance(data, Tensor) else _CPU
        return torch.tensor(data, dtype=tensor.dtype if dtype is None else dtype, **others)


class BuildingMode(DeviceMode):
    """Builds modules whose large tensors lie on the meta device and whose small ones are real."""

    MOST_ELEMENTS = 1 << 16

    def __init__(self) -> None:
        """Small tensors are made on the CPU."""
        super().__init__("cpu")

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> _Result:
        """Call a function; what makes a tensor decides by its size where."""
        given: Mapping[str, Any] = kwargs or {}
        sized = func in self.factories and func not in _LITERALS
        if sized and given.get("device") in (None, "cpu", _CPU):
            made = func(*args, **{**given, "device": torch.device("meta")})
            if made.numel() > self.MOST_ELEMENTS:
                return made
        return super().__torch_function__(func, types, args, kwargs)


def _with_literals(index: _Result) -> _Result:
    """Turn positions that are listed in an index into tensors; torch would lose their data."""
    if isinstance(index, tuple):
        return tuple([_with_literals(item) for item in index])
    is_listing = isinstance(index, list) and all(isinstance(item, int) for item in index)
    return torch.tensor(index) if is_listing else index
