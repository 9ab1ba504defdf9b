"""Runs emitted scripts in float64 throughout, where models compute parts of a step in float32."""

import torch
from driver import run_scripts
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode

CASTS = {
    torch.Tensor.to,
    torch.Tensor.type,
    torch.nn.functional.softmax,
    torch.nn.functional.log_softmax,
    torch.softmax,
    torch.log_softmax,
    torch.Tensor.softmax,
}
"""Functions that are told a dtype."""


def run_backward(tensors, *, grad_tensors, retain_graph, create_graph, inputs):
    """Run backward with the mode: it is off while it handles a function, and blocks run again."""
    roots, grads = map(tuple_of, (tensors, grad_tensors))
    grads = tuple(
        torch.ones_like(root) if grad is None else grad
        for root, grad in zip(roots, grads or (None,) * len(roots), strict=True)
    )
    keep = create_graph if retain_graph is None else retain_graph
    with InFloat64():
        _engine_run_backward(
            roots, grads, keep, create_graph, inputs or (),
            allow_unreachable=True, accumulate_grad=True,
        )  # fmt: skip


def tuple_of(tensors):
    if tensors is None or isinstance(tensors, torch.Tensor):
        return () if tensors is None else (tensors,)
    return tuple(tensors)


class InFloat64(TorchFunctionMode):
    """Leaves float64 tensors as they are where a model asks for float32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.autograd.backward:
            return run_backward(*args, **kwargs)
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype is torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            if func in CASTS:
                args = tuple(torch.float64 if each is torch.float32 else each for each in args)
                if kwargs.get("dtype") is torch.float32:
                    kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


def run_scripts_in_float64(jobs):
    with InFloat64():
        run_scripts(jobs)
