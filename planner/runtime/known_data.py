"""Answers to what a model asks of data that the meta device does not have."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map, tree_map_only

from .trees import Args, Function, Kwargs, Tree, cast_floats, tensors_of

_GROUPED_PRODUCTS = frozenset({"grouped_mm", "_grouped_mm"})
"""Functions of torch that multiply the tokens of each expert by its own weight."""


def run_on_meta(func: Function, args: Args, kwargs: Kwargs) -> Tree:
    """Run a function, also where the meta device has no kernel for it or one of other dtypes."""
    name = getattr(func, "__name__", "")
    if name == "ctc_loss" and args[0].is_meta:
        return args[0].sum()
    if name in _GROUPED_PRODUCTS:  # they take bfloat16 only
        return func(*cast_floats(args, torch.bfloat16), **kwargs).to(args[0].dtype)
    return func(*args, **kwargs)


class KnownData(TorchFunctionMode):
    """Answers what a model asks of data on the meta device, where constants and inputs tell it.

    It notes how each tensor without a parameter behind it is made, and runs that on the CPU when
    the model branches on it. A tensor that was changed in place is not known any more.
    """

    def __init__(self, on_meta: Tree, real: Tree) -> None:
        super().__init__()
        self._known: dict[tuple[int, int], tuple[Tensor, Callable[[], Tensor]]] = {}
        for tensor, data in zip(tensors_of(on_meta), tensors_of(real), strict=True):
            if not tensor.is_floating_point():
                self._know(tensor, data.detach)

    def __torch_function__(
        self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        kwargs = kwargs or {}
        if any(t.is_meta and self._key(t) not in self._known for t in tensors_of((args, kwargs))):
            return run_on_meta(func, args, kwargs)
        on_cpu = functools.cache(lambda: self._run_on_cpu(func, args, kwargs))
        try:
            output = func(*args, **kwargs)
        except RuntimeError:  # it needs data
            return tree_map_only(Tensor, self._known_meta, on_cpu())
        for position, tensor in enumerate(tensors_of(output)):
            if tensor.is_meta:
                made = functools.partial(lambda i: tensors_of(on_cpu())[i], position)
                self._known.setdefault(self._key(tensor), (tensor, made))
        return output

    @staticmethod
    def _key(tensor: Tensor) -> tuple[int, int]:
        return id(tensor), tensor._version

    def _know(self, tensor: Tensor, data: Callable[[], Tensor]) -> None:
        # The tensor is kept so that no other gets its id.
        self._known[self._key(tensor)] = tensor, data

    def _known_meta(self, data: Tensor) -> Tensor:
        tensor = data.to("meta")
        self._know(tensor, lambda: data)
        return tensor

    def _run_on_cpu(self, func: Function, args: Args, kwargs: Kwargs) -> Tree:
        def on_cpu(leaf: Tree) -> Tree:
            if isinstance(leaf, torch.device):
                return torch.device("cpu")
            is_meta = isinstance(leaf, Tensor) and leaf.is_meta
            return self._known[self._key(leaf)][1]() if is_meta else leaf

        cpu_args, cpu_kwargs = tree_map(on_cpu, (args, kwargs))
        return func(*cpu_args, **cpu_kwargs)
