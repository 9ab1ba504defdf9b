"""Runs emitted scripts in float64 throughout, where models compute parts of a step in float32."""

from itertools import pairwise

import torch
from driver import run_scripts
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


def grouped_product(tokens, weights, *, offs, **_):
    """Multiply the tokens of each expert by its weight; torch's kernels take no float64."""
    edges = [0, *offs.tolist()]
    pairs = pairwise(edges)
    return torch.cat([tokens[a:b] @ weight for (a, b), weight in zip(pairs, weights, strict=True)])


class InFloat64(TorchFunctionMode):
    """Leaves float64 tensors as they are where a model asks for float32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype is torch.float64:
            if func.__name__ in ("grouped_mm", "_grouped_mm"):
                return grouped_product(*args, **kwargs)
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
