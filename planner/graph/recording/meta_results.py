"""Results of ops on the meta device, remembered by the shapes of their arguments.

Running an op on the meta device costs tens of microseconds, most of it in torch's Python code
that works out shapes, strides and types. Blocks repeat, so that most ops are asked for again with
arguments of the same shapes; their results are then made empty, without asking torch again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from planner.graph import torch_private
from planner.graph.torch_private import TorchOp, TorchResult

_META = torch.device("meta")

_Form = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Sizes, strides and dtype of a tensor."""

_KEPT = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types of arguments that are compared by value."""


class MetaResults:
    """Runs ops on meta tensors, each distinct call once.

    Only for ops that neither alias nor change their inputs and whose results depend on nothing
    but the shapes of the arguments.
    """

    def __init__(self) -> None:
        self._forms: dict[object, list[_Form | None] | _Form] = {}

    def run(self, func: TorchOp, args: Sequence[Any], kwargs: dict[str, Any]) -> TorchResult:
        """Run an op, or make the empty results that an equal call had."""
        key = _key(func, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        forms = self._forms.get(key)
        if forms is None:
            result = func(*args, **kwargs)
            made = _forms(result, args, kwargs)
            if made is not None:
                self._forms[key] = made
            return result
        if isinstance(forms, tuple):
            size, stride, dtype = forms
            return torch.empty_strided(size, stride, dtype=dtype, device=_META)
        return tuple(
            [
                None
                if form is None
                else torch.empty_strided(form[0], form[1], dtype=form[2], device=_META)
                for form in forms
            ]
        )


def _key(func: TorchOp, args: Sequence[Any], kwargs: dict[str, Any]) -> object | None:
    """Spell a call by the shapes of its tensors, None where an argument cannot be compared."""
    parts: list[object] = [func]
    for argument in args:
        if isinstance(argument, Tensor):
            if not argument.is_meta:
                return None
            parts.append((argument.shape, argument.stride(), argument.dtype))
        elif argument is None or isinstance(argument, _KEPT):
            parts.append((argument.__class__, argument))
        elif isinstance(argument, (list, tuple)):
            inner = _key(func, argument, {})
            if inner is None:
                return None
            parts.append(inner)
        else:
            return None
    if kwargs:
        named = _key(func, tuple(kwargs.values()), {})
        if named is None:
            return None
        parts.append((tuple(kwargs), named))
    return tuple(parts)


def _forms(
    result: TorchResult, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[_Form | None] | _Form | None:
    """Describe fresh results, None where they cannot be made again from their form alone."""
    addresses = {
        torch_private.storage_key(tensor)[1]
        for tensor in torch_private.tree_leaves((args, kwargs))
        if isinstance(tensor, Tensor)
    }
    if isinstance(result, Tensor):
        return _form(result, addresses)
    if not isinstance(result, tuple):
        return None
    forms: list[_Form | None] = []
    for item in result:
        if item is None:
            forms.append(None)
            continue
        form = _form(item, addresses) if isinstance(item, Tensor) else None
        if form is None:
            return None
        forms.append(form)
    return forms


def _form(tensor: Tensor, addresses: set[int]) -> _Form | None:
    """Describe a tensor that owns all of its storage; adds the storage to the addresses."""
    storage, address = torch_private.storage_key(tensor)
    if address in addresses or tensor.storage_offset() or not tensor.is_meta:
        return None
    addresses.add(address)
    form = (tensor.shape, tensor.stride(), tensor.dtype)
    again = torch.empty_strided(form[0], form[1], dtype=form[2], device=_META)
    return form if again.untyped_storage().nbytes() == storage.nbytes() else None
