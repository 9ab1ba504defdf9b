"""Data that tracing assumes, each with its reason; whoever reads it is told.

Some data does not depend on the model in a way that matters for its cost, although only a real
run has it: random draws are taken at their mean, choices among experts as spread evenly,
activations as free of NaN and infinity.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

MOST_CHOICES = 1024
"""A choice among more than this many is no routing to experts."""


class Assumption(StrEnum):
    """What known data rests on, as it is told after "the data is"."""

    MEAN = "taken at the mean of its random draws"
    EVEN = "taken with choices (of experts, for one) spread evenly"
    FINITE = "taken as free of NaN and infinity"
    BUFFER = "taken as the buffer is built"
    ASSERTED = "taken as asserted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """Assumed data of one result of an op."""

    assumption: Assumption
    """Why it is what it is."""
    position: int
    """Which result it is."""
    make: "Make"
    """Makes the data, from the data of the op's inputs where it needs them."""
    needs_inputs: bool = False
    """Whether it needs them."""
    ends: "tuple[Make, Make] | None" = None
    """Make it at the low and at the high end of its draws; None where it is no draw."""


Make = Callable[[list[Tensor]], Tensor]
"""Makes data, from the data of an op's inputs where it needs them."""


def assumed_values(
    name: str,
    arguments: tuple[Sequence[Any], Mapping[str, Any]],
    inputs: Sequence[int],
    made: Sequence[Tensor],
) -> Assumed | None:
    """Assume the data of one result of an op, None where nothing is known of it.

    Args:
        name: Name of the op.
        arguments: Its positional and keyword arguments.
        inputs: Value numbers of the tensors in its arguments, in order.
        made: Its results, without data; for an in-place op what it writes to.
    """
    args, kwargs = arguments
    if name in _MEANS:
        draw = _MEANS[name](args)
        return None if draw is None else _drawn(made[0], *draw)
    if name == "bernoulli":
        dtype = made[0].dtype
        return Assumed(
            assumption=Assumption.MEAN,
            position=0,
            make=lambda known: (known[0] > 0.5).to(dtype),
            needs_inputs=True,
            ends=(lambda known: (known[0] >= 1).to(dtype), lambda known: (known[0] > 0).to(dtype)),
        )
    if name == "randperm":
        return Assumed(assumption=Assumption.MEAN, position=0, make=lambda _: torch.arange(args[0]))
    if name in _CHOSEN:
        return _routed(name, args, kwargs, made)
    finite = _finite(name, args, inputs)
    if finite is None:
        return None
    return Assumed(assumption=Assumption.FINITE, position=0, make=_filled(made[0], finite))


def _argument(args: Sequence[Any], position: int, default: float) -> float:
    return args[position] if len(args) > position else default


_Draw = tuple[float, float, float]
"""Mean of a draw (of two outcomes the likelier), and the ends of its range."""

_FAR = 1e9
"""Farther than any draw of a normal distribution."""


def _uniform(args: Sequence[Any]) -> _Draw:
    low, high = _argument(args, 1, 0.0), _argument(args, 2, 1.0)
    return (low + high) / 2, low, high


def _integer(args: Sequence[Any]) -> _Draw:
    low, high = (0, args[0]) if isinstance(args[1], (list, tuple)) else args[:2]
    return int(low + high - 1) // 2, low, high - 1


def _normal(args: Sequence[Any]) -> _Draw:
    return _argument(args, 1, 0.0), -_FAR, _FAR


def _of_two(args: Sequence[Any]) -> _Draw | None:
    share = _argument(args, 1, 0.5)
    if not isinstance(share, (int, float)):
        return None
    return float(share > 0.5), float(share >= 1), float(share > 0)


_BELOW_ONE = 1 - 2**-24
"""The largest float32 below 1."""

_MEANS: Mapping[str, Callable[[Sequence[Any]], _Draw | None]] = {
    "rand": lambda _: (0.5, 0.0, _BELOW_ONE),
    "rand_like": lambda _: (0.5, 0.0, _BELOW_ONE),
    "uniform_": _uniform,
    "randn": lambda _: (0.0, -_FAR, _FAR),
    "randn_like": lambda _: (0.0, -_FAR, _FAR),
    "normal_": _normal,
    "randint": _integer,
    "bernoulli_": _of_two,
}
"""A draw by op, from its arguments."""

_CHOSEN: Mapping[str, int] = {
    "topk": 1,
    "sort": 1,
    "max": 1,
    "min": 1,
    "argmax": 0,
    "argmin": 0,
    "multinomial": 0,
}
"""Ops that choose along a dim, with the position of the chosen indices among their results."""


def _filled(form: Tensor, number: float) -> Make:
    shape, dtype = form.shape, form.dtype
    return lambda _: torch.full(shape, number, dtype=dtype)


def _drawn(form: Tensor, mean: float, low: float, high: float) -> Assumed:
    return Assumed(
        assumption=Assumption.MEAN,
        position=0,
        make=_filled(form, mean),
        ends=(_filled(form, low), _filled(form, high)),
    )


def _chosen_dim(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Return the dim along which an op chooses, None where it chooses among all elements."""
    if name == "multinomial":
        return -1
    position = 2 if name == "topk" else 1
    default = None if name in ("argmax", "argmin") else -1
    dim = kwargs.get("dim", args[position] if len(args) > position else default)
    if dim is None:
        return -1 if args[0].dim() == 1 else None
    return int(dim)


def _routed(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], made: Sequence[Tensor]
) -> Assumed | None:
    """Choose in turn: row r takes the choices r k to r k + k - 1, modulo their number.

    Where all are taken, in some order, row r begins with choice r.
    """
    position = _CHOSEN[name]
    source: Tensor = args[0]
    if position >= len(made) or not source.dim():
        return None
    dim = _chosen_dim(name, args, kwargs)
    if dim is None or not 1 < source.shape[dim] <= MOST_CHOICES:
        return None
    choices: int = source.shape[dim]
    shape = list(made[position].shape)
    keeps_dim = len(shape) == source.dim()
    taken = shape.pop(dim) if keeps_dim else 1

    def make(_: list[Tensor]) -> Tensor:
        step = taken if taken < choices else 1
        first = torch.arange(math.prod(shape)).view(*shape, 1) * step
        chosen = (first + torch.arange(taken)) % choices
        if not keeps_dim:
            return chosen.squeeze(-1)
        return chosen.movedim(-1, dim)

    return Assumed(assumption=Assumption.EVEN, position=position, make=make)


def _finite(name: str, args: Sequence[Any], inputs: Sequence[int]) -> float | None:
    """Answer a test for NaN (x == x, x != x) or infinity, None for any other op."""
    if name in ("isnan", "isinf", "isposinf", "isneginf"):
        return 0.0
    if name not in ("eq", "ne"):
        return None
    if len(inputs) == 2 and inputs[0] == inputs[1]:
        return float(name == "eq")
    if isinstance(args[1], float) and math.isinf(args[1]):
        return float(name == "ne")
    return None
