"""What a checkpoint holds, under the user's own parameter names: readable in any other layout."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .part import Part, named_parameters
from .processes import RunError, agreed
from .weights import open_weights

Values: TypeAlias = dict[tuple[str, str], Tensor]
"""Tensors by kind ("weights", "exp_avg") and the user's name; a checkpoint joins these by a dot."""

MODEL_KINDS = {"weights", "buffers", "extra"}
"""Kinds that are no state of an optimiser."""


def state_of(parts: Sequence[Part], optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """Return what a checkpoint holds of this rank, by name: weights, buffers, optimisers' states.

    Raises:
        RunError: An optimiser keeps what cannot be saved.
    """
    values: Values = {}
    with agreed("the state cannot be saved"):
        for part in parts:
            values |= _in_user_order(part, _of_model(part) | _of_optimizers(part, optimizers))
    return {".".join(key): value for key, value in values.items()}


def load_state(parts: Sequence[Part], optimizers: Sequence[Optimizer], checkpoint: Path) -> None:
    """Read a checkpoint in place. What it has no state of starts without one.

    Raises:
        RunError: It is of another model or optimiser.
    """
    with agreed(f"{checkpoint} cannot be resumed from"):
        reader = FileSystemReader(checkpoint)
        stored = reader.read_metadata().state_dict_metadata
        kinds = {name.partition(".")[0] for name in stored} - MODEL_KINDS
        for optimizer in optimizers:
            _make_state(optimizer)
        for part in parts:
            for name, parameter in named_parameters(part):
                if not any(f"{kind}.{name}" in stored for kind in kinds):
                    for optimizer in optimizers:
                        optimizer.state.pop(parameter, None)
            values = _of_model(part) | _of_optimizers(part, optimizers)
            _read(reader, part, values, {key: ".".join(key) for key in values})


def load_weights(parts: Sequence[Part], path: Path) -> None:
    """Read the model alone, from safetensors or a checkpoint of torch.

    Raises:
        RunError: It does not fit the model.
    """
    with agreed(f"{path} cannot be read"):
        reader, stored = open_weights(path, parts[0].shapes, parts[0].first_names)
        for part in parts:
            values = {key: each for key, each in _of_model(part).items() if key[1] in stored}
            _read(reader, part, values, {key: stored[key[1]] for key in values})


def _of_model(part: Part) -> Values:
    weights: Values = {("weights", name): p.detach() for name, p in named_parameters(part)}
    return weights | {("buffers", name): buffer for name, buffer in part.saved_buffers()}


def _of_optimizers(part: Part, optimizers: Sequence[Optimizer]) -> Values:
    """Return what optimisers keep: tensors of the parameter's shape, or numbers.

    Raises:
        RunError: They keep something else.
    """
    values: Values = {}
    for optimizer in optimizers:
        for name, parameter in named_parameters(part):
            for kind, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.shape in (parameter.shape, ()):
                    values[kind, name] = value.detach()
                elif value is not None:
                    is_tensor = isinstance(value, Tensor)
                    what = f"of shape {tuple(value.shape)}" if is_tensor else repr(value)
                    raise RunError(
                        f"the optimiser keeps {kind} of {name}, {what}: a checkpoint takes tensors "
                        f"of the parameter's shape, {tuple(parameter.shape)}, and of none"
                    )
    return values


def _in_user_order(part: Part, values: Values) -> Values:
    """Return values as a checkpoint has them."""
    return {
        (kind, name): part.orders[name].in_user_order(value)
        if name in part.orders and isinstance(value, DTensor)
        else value
        for (kind, name), value in values.items()
    }


def _read(
    reader: FileSystemReader, part: Part, values: Values, stored: Mapping[tuple[str, str], str]
) -> None:
    """Read values in place, each by the name that it is stored under."""
    state = _in_user_order(part, values)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load({stored[key]: value for key, value in state.items()}, storage_reader=reader)
    for key, value in values.items():
        if state[key] is not value:
            part.orders[key[1]].restore(state[key], value)
    part.has_weights = True


def _make_state(optimizer: Optimizer) -> None:
    """Let an optimiser make what it keeps, by a step of no gradient at no learning rate."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
