"""Weights of all experts, of which this rank has its own."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import functional

from .trees import Args, Function, Kwargs, Tree
from .unread import SplitError


class OwnExperts(Tensor):
    """Weights that look like those of all experts, and have those of some, the first dim.

    The rows that a module reads are for these alone, by numbers among all.
    """

    local: Tensor
    first: int

    @staticmethod
    def of(local: Tensor, first: int, number: int) -> "OwnExperts":
        """Show what this rank has.

        Args:
            local: Weights of its experts, with their gradients.
            first: Number of the first of them.
            number: Experts of all ranks.
        """
        shape = (number, *local.shape[1:])
        made: OwnExperts = torch.Tensor._make_wrapper_subclass(
            OwnExperts, shape, dtype=local.dtype, device=local.device
        )
        made.local, made.first = local, first
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        end = self.first + self.local.shape[0]
        return f"OwnExperts({tuple(self.shape)}, {self.first} to {end})"

    @classmethod
    def __torch_function__(
        cls, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        name = getattr(func, "__name__", "")
        if name == "__get__":  # of an attribute
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        run = _WAYS.get(name)
        if run is not None:
            return run(func, *args, **(kwargs or {}))
        if name not in _FACTS:
            raise SplitError(f"{name} is not known to run on the experts of one rank")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        raise SplitError(f"{func} is not known to run on the experts of one rank")


_FACTS = frozenset(
    {
        "size", "dim", "numel", "is_floating_point", "__len__", "__repr__",
        "shape", "ndim", "dtype", "device", "layout", "is_cuda", "is_cpu", "is_meta",
        "requires_grad", "is_sparse", "is_quantized", "itemsize", "_version",
    }
)  # fmt: skip
"""What is read of a tensor without its elements."""


def _of_each(func: Function, experts: Tree, *args: Tree, **kwargs: Tree) -> Tensor:
    """Run what does the same to the weights of each expert."""
    assert isinstance(experts, OwnExperts)
    made = func(experts.local, *args, **kwargs)
    if made.shape[0] != experts.local.shape[0]:
        raise SplitError(f"{getattr(func, '__name__', func)} moves the dim of experts")
    return OwnExperts.of(made, experts.first, experts.shape[0])


def _grouped(
    func: Function, rows: Tensor, experts: Tree, offs: Tensor | None = None, **kwargs: Tree
) -> Tensor:
    """Multiply the rows of each expert: those of others have none."""
    assert isinstance(experts, OwnExperts)
    assert offs is not None
    own = offs[experts.first : experts.first + experts.local.shape[0]]
    made: Tensor = func(rows, experts.local, offs=own, **kwargs)
    return made


def _chosen(func: Function, experts: Tree, index: Tree) -> Tensor:
    """Take the weights of experts by their numbers, which tell those of this rank's rows."""
    assert isinstance(experts, OwnExperts)
    numbers, *rest = index if isinstance(index, tuple) else (index,)
    if not isinstance(numbers, Tensor) or numbers.dtype is torch.bool:
        raise SplitError("experts are chosen by no number of theirs among all")
    made: Tensor = func(experts.local, (numbers - experts.first, *rest))
    return made


def _ways() -> Iterable[tuple[str, Callable[..., Tensor]]]:
    for name in ("transpose", "swapaxes", "permute", "contiguous", "to", "unsqueeze", "mT"):
        yield name, _of_each
    for function in (functional.grouped_mm, torch._grouped_mm):
        yield function.__name__, _grouped
    yield "__getitem__", _chosen


_WAYS = dict(_ways())
"""By name of a function of torch: how it runs."""
