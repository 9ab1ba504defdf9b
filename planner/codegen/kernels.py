"""Kernels that a CPU does not have, found before a script is written.

Tensors without data take ops in dtypes that the kernels on a device refuse. Each function of torch
that a model calls therefore runs once for the dtypes of its arguments, forward and backward, on
tensors with data of the same shapes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_map_only

from planner.errors import CodegenError
from planner.graph.loading.source import lines_of_stack
from planner.graph.torch_private import modes_disabled
from planner.runtime.trees import Args, Function, Kwargs, Tree, tensors_of

MOST_BYTES = 64 << 20
"""Of the arguments of a call that is tried; larger ones are taken on trust."""

NO_KERNEL = "Could not run"
"""torch's words where an op has no kernel for a device."""


class KernelTrial(TorchFunctionMode):
    """Runs each function that is called inside of it on a CPU too, once for each set of dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self._tried: set[object] = set()

    def __torch_function__(
        self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        kwargs = kwargs or {}
        tensors = tensors_of((args, kwargs))
        key = func, tuple(tensor.dtype for tensor in tensors)
        is_floating = any(tensor.is_floating_point() for tensor in tensors)
        is_small = sum(tensor.nbytes for tensor in tensors) <= MOST_BYTES
        if is_floating and is_small and key not in self._tried:
            self._tried.add(key)
            _try(func, args, kwargs)
        return func(*args, **kwargs)


def _try(func: Function, args: Args, kwargs: Kwargs) -> None:
    """Refuse a call that fails by its dtypes: in float32 it runs, or no CPU has a kernel for it.

    Raises:
        CodegenError: It does.
    """
    error = _failure(func, args, kwargs, lambda dtype: dtype)
    if error is None:
        return
    runs_in_float32 = _failure(func, args, kwargs, _float32_of) is None
    if not runs_in_float32 and NO_KERNEL not in str(error):
        return  # zeros and ones may be no data that it takes
    dtypes = dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in tensors_of((args, kwargs)))
    name = resolve_name(func) or getattr(func, "__name__", str(func))
    line = next(lines_of_stack(), None)
    raise CodegenError(
        f"the script is for CPUs, and their kernel of {name} does not take {' and '.join(dtypes)}"
        + (f", at {line}" if line else "")
        + f"\n{type(error).__name__}: {str(error).partition(chr(10))[0]}",
        hint="plan with --dtype float32, in which it runs"
        if runs_in_float32
        else "plan for a cluster of devices that have it, or write the line with other functions",
    )


def _failure(
    func: Function, args: Args, kwargs: Kwargs, dtype_of: Callable[[torch.dtype], torch.dtype]
) -> Exception | None:
    """Run a call forward and backward on tensors with data; return what it raises."""

    def real(tensor: Tensor) -> Tensor:
        dtype = dtype_of(tensor.dtype)
        made = torch.full(tensor.shape, int(dtype.is_floating_point), dtype=dtype, device="cpu")
        return made.requires_grad_().clone() if tensor.requires_grad else made

    with modes_disabled(), torch.random.fork_rng(devices=[]):
        real_args: tuple[Any, ...]
        real_args, real_kwargs = tree_map_only(Tensor, real, (tuple(args), kwargs))
        try:
            roots = [t for t in tensors_of(func(*real_args, **real_kwargs)) if t.requires_grad]
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        except Exception as error:  # whatever torch raises
            return error
    return None


def _float32_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point else dtype
