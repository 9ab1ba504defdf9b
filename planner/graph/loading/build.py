"""Building the user's model on the meta device, whatever its construction does."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from planner.errors import ModelError
from planner.graph.loading.devices import BuildingMode, DeviceMode
from planner.graph.loading.fixed_seed import fixed_seed
from planner.graph.torch_private import TorchResult
from planner.units import format_bytes

MOST_REAL_BYTES = 1 << 30
"""Bytes that the construction of a model with data may make in all."""

_DATA_WORDS = ("meta", "unallocated storage")
"""What torch says when data is wanted that a meta tensor has not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    """A model on the meta device."""

    module: nn.Module
    """The model."""
    buffers: Mapping[str, Tensor]
    """Buffers by name that were built with data."""
    notes: tuple[str, ...] = ()
    """How it was built, where that was not on the meta device alone."""


class _TooLargeError(Exception):
    """The construction makes more data than it may."""


class _CountingMode(DeviceMode):
    """Builds on the CPU with data, as long as that stays small."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.made_bytes = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> TorchResult:
        if func not in self.factories:
            return super().__torch_function__(func, types, args, kwargs)
        size = func(*args, **{**(kwargs or {}), "device": torch.device("meta")}).nbytes
        self.made_bytes += size
        if self.made_bytes > MOST_REAL_BYTES:
            raise _TooLargeError
        return super().__torch_function__(func, types, args, kwargs)


def build_on_meta(make_model: Callable[[], nn.Module], description: str) -> BuiltModel:
    """Build a model without allocating its weights.

    On the meta device; where its construction reads data, with small tensors on the CPU; where
    that does not do, with data, as long as this is little.

    Args:
        make_model: Builds the model; user code, whose own errors pass.
        description: What the user named, for messages.

    Raises:
        ModelError: It returns no module, or one that cannot be traced.
    """
    try:
        with DeviceMode("meta"), fixed_seed():
            made = make_model()
        return BuiltModel(module=_on_meta(made, description), buffers=real_buffers(made))
    except (RuntimeError, TypeError, ValueError) as error:
        if not any(word in str(error) for word in _DATA_WORDS):
            raise
        first = error
    for mode in (BuildingMode(), _CountingMode()):
        try:
            with mode, fixed_seed():
                made = make_model()
        except ModelError:
            raise
        except Exception:
            continue
        return BuiltModel(
            module=_on_meta(made, description),
            buffers=real_buffers(made),
            notes=_how(description, mode, first) if isinstance(mode, _CountingMode) else (),
        )
    raise first


def _how(description: str, mode: _CountingMode, error: Exception) -> tuple[str, ...]:
    return (
        f"{description} was built with data on the CPU ({format_bytes(mode.made_bytes)}), since"
        f" its construction reads data: {error}",
    )


def real_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Collect the buffers that have data."""
    return {name: buffer for name, buffer in module.named_buffers() if not buffer.is_meta}


def first_buffers(make_model: Callable[[], nn.Module]) -> dict[str, Tensor]:
    """Build a model again for the data that its small buffers have at first.

    Returns:
        The buffers by name, without those whose data cannot be had.
    """
    try:
        with BuildingMode(), fixed_seed():
            return real_buffers(make_model())
    except Exception:
        return {}


def _on_meta(made: nn.Module, description: str) -> nn.Module:
    """Check what a factory returned and bring it onto the meta device."""
    if not isinstance(made, nn.Module):
        raise ModelError(
            f"{description} must return an nn.Module, but it returned {type(made).__name__}.",
            hint="Add to the model file:\n    def build_model():\n        return MyModel()",
        )
    check_kind(made, description)
    if any(not tensor.is_meta for tensor in (*made.parameters(), *made.buffers())):
        return meta_copy(made)
    return made


def check_kind(model: nn.Module, description: str) -> None:
    """Refuse modules that are no plain ones.

    Raises:
        ModelError: The module is compiled, wrapped for parallel training, lazy, or its
            parameters are special tensors.
    """
    if hasattr(model, "_orig_mod"):
        raise ModelError(
            f"{description} returns a compiled module, which the script cannot cut into stages.",
            hint="Return the module itself; compile it after the plan is made.",
        )
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise ModelError(
            f"{description} returns a {type(model).__name__}, which distributes the model itself.",
            hint="Return the bare module (its .module): the plan says how it is distributed.",
        )
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(parameter):
            raise ModelError(
                f"{description} has a lazy module: the shape of {name} is known only after a first"
                " forward pass.",
                hint="Use the module that takes its sizes, such as nn.Linear(in, out), or run one"
                " batch through the model before it is returned.",
            )
        if type(parameter.data) is not Tensor:
            raise ModelError(
                f"{description}: {name} is a {type(parameter.data).__name__}. Only plain tensors"
                " are traced.",
                hint="Return the model before it is sharded or quantised.",
            )


def meta_copy(module: nn.Module) -> nn.Module:
    """Copy a module onto the meta device: tied parameters stay tied, no data is read.

    Raises:
        ModelError: It holds what Python cannot copy.
    """
    if any(isinstance(child, torch.jit.ScriptModule) for child in module.modules()):
        raise ModelError(
            f"{type(module).__name__} holds a scripted module with data, which cannot be copied"
            " onto the meta device.",
            hint="Pass a function that builds the module, or the module before it is scripted.",
        )
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        twin = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(twin, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    for child in module.modules():
        for attribute in vars(child).values():
            if isinstance(attribute, Tensor) and id(attribute) not in memo:
                # Results of weight_norm and the like cannot be copied; others need no copy.
                is_result = attribute.grad_fn is not None
                twin = torch.empty_like(attribute, device="meta") if is_result else attribute
                memo[id(attribute)] = twin
    try:
        return copy.deepcopy(module, memo)
    except TypeError as error:
        raise ModelError(
            f"{type(module).__name__} cannot be copied onto the meta device: {error}.",
            hint="Pass a function that builds the module instead of the module itself.",
        ) from error
