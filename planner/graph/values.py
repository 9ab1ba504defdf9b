"""What is known of the data in meta tensors: constants, computed only when they are asked for."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from planner.errors import ModelError
from planner.graph import torch_private
from planner.graph.source import line_of_stack
from planner.graph.torch_private import TorchOp

MAX_CONSTANT_ELEMENTS = 1 << 20
"""Larger tensors are never computed for their values."""


class ConstantValues:
    """Real values of the tensors that depend on nothing but constants and integer inputs.

    A model asks for data with ``.item()``, ``bool(tensor)`` or ``nonzero``. Where the answer
    follows from constants (arange, zeros, the example's integer inputs), the chain of ops is run
    for real on the CPU; where it depends on weights or activations, tracing cannot know it.
    Tensors are named by their value number, so an in-place change never leaves a stale constant.
    """

    def __init__(self) -> None:
        self._real: dict[int, Tensor] = {}
        self._recipes: dict[int, tuple[Any, Sequence[Any], dict[str, Any], Sequence[int], int]] = {}

    def seed(self, value: int, real: Tensor) -> None:
        """Remember the data of a value."""
        if real.numel() <= MAX_CONSTANT_ELEMENTS:
            self._real[value] = real

    def knows(self, value: int) -> bool:
        """Tell whether the data of a value can be computed."""
        return value in self._real or value in self._recipes

    def observe(
        self,
        func: TorchOp,
        arguments: tuple[Sequence[Any], dict[str, Any]],
        inputs: Sequence[int],
        outputs: Sequence[tuple[int, Tensor]],
    ) -> None:
        """Remember how an op makes its outputs, where all its inputs are known."""
        if not all(self.knows(value) for value in inputs):
            return
        if sum(tensor.numel() for _, tensor in outputs) > MAX_CONSTANT_ELEMENTS:
            return
        args, kwargs = arguments
        for position, (value, _) in enumerate(outputs):
            self._recipes[value] = (func, args, kwargs, inputs, position)

    def compute(self, value: int) -> Tensor | None:
        """Compute the data of a value on the CPU, None where it is unknown."""
        if value in self._real:
            return self._real[value]
        recipe = self._recipes.get(value)
        if recipe is None:
            return None
        func, args, kwargs, inputs, position = recipe
        known = [self.compute(needed) for needed in inputs]
        results = run_for_real(func, args, kwargs, known)
        self._real[value] = results[position]
        return results[position]


def run_for_real(
    func: TorchOp, args: Sequence[Any], kwargs: dict[str, Any], inputs: Sequence[Tensor | None]
) -> list[Tensor]:
    """Run an op on the CPU with its tensors replaced, in argument order, by ``inputs``."""
    remaining = iter(inputs)
    real_args, real_kwargs = torch_private.tree_map_only(
        Tensor, lambda _: next(remaining), (tuple(args), dict(kwargs))
    )
    if "device" in real_kwargs:
        real_kwargs["device"] = torch.device("cpu")
    with torch_private.modes_disabled():
        result = func(*real_args, **real_kwargs)
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, (tuple, list)):
        return [item for item in result if isinstance(item, Tensor)]
    return [torch.tensor(result)]


def data_dependent_error(op_name: str) -> ModelError:
    """Say that the model asks for data which only a real run has."""
    line = line_of_stack()
    where = f" at {line}" if line else ""
    return ModelError(
        f"The model reads the data of a tensor ({op_name}){where}. It is traced without data, and"
        " this value depends on weights or activations.",
        hint="Decide from shapes or from constants instead (.item(), bool(tensor), nonzero and"
        " boolean indexing need data), or keep the result on the device with torch.where.",
    )
