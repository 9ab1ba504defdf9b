"""What functions of torch give that read data, by the answers of a plan."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from .trees import Args, Function, Kwargs, Tree

NUMBER_READS: Mapping[str, Callable[[float], object]] = {
    "__bool__": bool,
    "__contains__": bool,
    "allclose": bool,
    "is_nonzero": bool,
    "equal": bool,
    "__int__": int,
    "__index__": int,
    "__float__": float,
}
"""Functions that read one number, and its type."""


def is_number_in_text(func: Function, args: Args) -> bool:
    """Tell whether a whole number is written into text, of which names are made."""
    if getattr(func, "__name__", "") != "__format__":
        return False
    return args[0].dim() == 0 and not args[0].is_floating_point()


def unpacked(answers: Sequence[tuple[float, int]]) -> list[float]:
    """List answers, of which each stands with how often it is given in a row."""
    return [value for value, times in answers for _ in range(times)]


class Answers(Iterator[float]):
    """Answers in turn, from the first again after the last."""

    def __init__(self, values: Sequence[float]) -> None:
        self._values = values
        self.given = 0
        """How many were given; set it back to hear them again."""

    def __next__(self) -> float:
        if not self._values:
            raise StopIteration
        self.given += 1
        return self._values[(self.given - 1) % len(self._values)]


def answered(func: Function, args: Args, kwargs: Kwargs, answers: Iterator[float]) -> Tree:
    """Return what a function gives that reads data, from the next answers of its line.

    Raises:
        RuntimeError: It is no function whose result the answers tell.
    """
    name, source = getattr(func, "__name__", ""), args[0]
    if name in NUMBER_READS:
        return NUMBER_READS[name](next(answers))
    if name == "item":
        answer = next(answers)
        if source.dtype is torch.bool:
            return bool(answer)
        return answer if source.is_floating_point() else int(answer)
    if (
        name in ("nonzero", "where", "argwhere")
        and len(args) + len(kwargs) - ("as_tuple" in kwargs) == 1
    ):
        size = int(next(answers))
        if name == "where" or kwargs.get("as_tuple"):
            return _positions(size, source, source.dim())
        return torch.empty((size, source.dim()), dtype=torch.long, device=source.device)
    if name == "tolist":
        return _listed([next(answers) for _ in range(source.numel())], source)
    if name in _SIZED:
        return _SIZED[name](int(next(answers)), source, *args[1:], **kwargs)
    if name == "__getitem__":
        places: list[Tree] = []
        for index in args[1] if isinstance(args[1], tuple) else (args[1],):
            is_mask = isinstance(index, Tensor) and index.dtype is torch.bool
            places += _positions(int(next(answers)), index, index.dim()) if is_mask else [index]
        return func(source, tuple(places))
    raise RuntimeError(f"{name} reads data that neither the plan nor the model's inputs tell")


def _selected(size: int, of: Tensor, *_: Tree, **__: Tree) -> Tensor:
    """Return what ``masked_select`` gives of so many elements."""
    return torch.empty(size, dtype=of.dtype, device=of.device)


def _counts(
    size: int, of: Tensor, weights: Tensor | None = None, minlength: int = 0, **_: Tree
) -> Tensor:
    """Return what ``bincount`` gives of so many bins."""
    dtype = torch.long
    if weights is not None:
        dtype = torch.float32 if weights.dtype is torch.float32 else torch.float64
    return torch.empty(size, dtype=dtype, device=of.device)


def _repeated(
    size: int, of: Tensor, repeats: Tensor | None = None, dim: int | None = None, **_: Tree
) -> Tensor:
    """Return what ``repeat_interleave`` gives: so many positions, or elements at them."""
    (positions,) = _positions(size, of, 1)
    if repeats is None:
        return positions
    return of.flatten()[positions] if dim is None else of.index_select(dim, positions)


def _distinct(
    size: int,
    of: Tensor,
    *,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
    **_: Tree,
) -> Tree:
    """Return what ``unique`` gives where so many are distinct."""
    (positions,) = _positions(size, of, 1)
    values = of.flatten()[positions] if dim is None else of.index_select(dim, positions)
    whole = of.shape if dim is None else (of.shape[dim],)
    found = [values.detach()]
    if return_inverse:
        found.append(torch.empty(whole, dtype=torch.long, device=of.device))
    if return_counts:
        found.append(positions)
    return tuple(found) if len(found) > 1 else found[0]


_SIZED: Mapping[str, Callable[..., Tree]] = {
    "masked_select": _selected,
    "bincount": _counts,
    "repeat_interleave": _repeated,
    "unique": _distinct,
    "unique_consecutive": _distinct,
}
"""What functions give whose first size the answer is."""


def _listed(numbers: Sequence[float], source: Tensor) -> Tree:
    """Return numbers as the nested lists of a tensor of this shape."""
    return torch.tensor(numbers, dtype=source.dtype, device="cpu").view(source.shape).tolist()


def positions_of_rows(changed: Tensor, index: Tree, rows: Tree) -> Tree:
    """Say by positions what a mask chooses to get rows: backward would look for them in its data.

    There are as many as rows are given, or as the mask has elements where all get the same.
    """
    first, *rest = index if isinstance(index, tuple) else (index,)
    is_mask = isinstance(first, Tensor) and first.dtype is torch.bool
    has_data = type(first) is Tensor and not first.is_meta  # other types are fake tensors
    if not is_mask or has_data or not isinstance(rows, Tensor):
        return index
    one_each = rows.dim() == changed.dim() - first.dim() + 1
    size = rows.shape[0] if one_each and rows.shape[0] != 1 else first.numel()
    return (*_positions(size, first, first.dim()), *rest)


def _positions(size: int, of: Tensor, dims: int) -> tuple[Tensor, ...]:
    return tuple(torch.empty(size, dtype=torch.long, device=of.device) for _ in range(dims))
