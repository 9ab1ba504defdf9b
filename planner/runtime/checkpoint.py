"""Checkpoints under the user's own parameter names, readable in any other layout."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from .checkpoint_folders import step_of
from .part import Part, named_parameters
from .processes import RunError, agreed
from .weights import ModelNames, open_weights

Values: TypeAlias = dict[tuple[str, str], Tensor]
"""Tensors by kind ("weights", "exp_avg") and the user's name; a checkpoint joins these by a dot."""

MODEL_KINDS = ("weights", "buffers", "extra")
"""Kinds that are no state of an optimiser."""


@dataclass(slots=True)
class Checkpointer:
    """Saves and loads weights, buffers, what optimisers keep of them, and the step."""

    parts: Sequence[Part]
    """This rank's stages, or the plain model."""
    optimizers: Sequence[torch.optim.Optimizer]
    """Over their trained parameters; what they keep has a parameter's shape, or is a number."""

    def state(self, extra: Mapping[str, bytes]) -> dict[str, Tensor]:
        """Return what a checkpoint holds, by name.

        Args:
            extra: What else this rank keeps, by a name that all who keep the same give it.

        Raises:
            RunError: An optimiser keeps what cannot be saved.
        """
        with agreed("the state cannot be saved"):
            values: Values = {}
            for part in self.parts:
                values |= _in_user_order(part, {**_of_model(part), **self._of_optimizers(part)})
            for name, content in extra.items():
                values["extra", name] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return {".".join(key): value for key, value in values.items()}

    def load(self, checkpoint: Path) -> int:
        """Read a checkpoint, and return the steps that it has seen.

        Raises:
            RunError: It is of another model or optimiser.
        """
        with agreed(f"{checkpoint} cannot be resumed from"):
            reader = FileSystemReader(checkpoint)
            kinds = {name.partition(".")[0] for name in reader.read_metadata().state_dict_metadata}
            has_states = bool(kinds.difference(MODEL_KINDS))
            for optimizer in self.optimizers if has_states else ():
                _make_state(optimizer)
            for part in self.parts:
                values = {**_of_model(part), **(self._of_optimizers(part) if has_states else {})}
                _read(reader, part, values, {key: ".".join(key) for key in values})
        return step_of(checkpoint)

    def load_weights(self, path: Path, names: ModelNames) -> None:
        """Read the model alone, from safetensors or a checkpoint of torch.

        Raises:
            RunError: It does not fit the model.
        """
        with agreed(f"{path} cannot be read"):
            reader, stored = open_weights(path, names)
            for part in self.parts:
                values = {key: each for key, each in _of_model(part).items() if key[1] in stored}
                _read(reader, part, values, {key: stored[key[1]] for key in values})

    def _of_optimizers(self, part: Part) -> Values:
        """Return what optimisers keep: zeros for parameters that have not had a gradient yet.

        Raises:
            RunError: It has neither the shape of its parameter nor is it a number.
        """
        values: Values = {}
        for optimizer in self.optimizers:
            like: dict[str, Any] = next((state for state in optimizer.state.values() if state), {})
            trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for name, parameter in named_parameters(part):
                if id(parameter) not in trained:
                    continue
                state = optimizer.state[parameter] if like else {}
                for kind, value in like.items():
                    if kind not in state and isinstance(value, Tensor):
                        shaped = parameter if value.ndim else value
                        state[kind] = torch.zeros_like(shaped, dtype=value.dtype)
                for kind, value in state.items():
                    if value is not None:
                        values[kind, name] = _checked(kind, name, value, parameter)
        return values


def _of_model(part: Part) -> Values:
    weights: Values = {("weights", name): p.detach() for name, p in named_parameters(part)}
    return weights | {("buffers", name): buffer for name, buffer in part.saved_buffers()}


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
    with _alone() as alone:
        named = {stored[key]: value for key, value in state.items()}
        dcp.load(named, storage_reader=reader, no_dist=alone)  # type: ignore[attr-defined]
    for key, value in values.items():
        if state[key] is not value:
            part.orders[key[1]].restore(state[key], value)
    part.has_weights = True


def _checked(kind: str, name: str, value: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(value, Tensor) or value.shape not in (parameter.shape, ()):
        what = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise RunError(
            f"the optimiser keeps {kind} of {name}, {what}: a checkpoint takes tensors of the "
            f"parameter's shape, {tuple(parameter.shape)}, and of none"
        )
    return value.detach()


def _make_state(optimizer: torch.optim.Optimizer) -> None:
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


def read_extra(checkpoint: Path, name: str) -> bytes | None:
    """Return what ``Checkpointer.save`` got as extra under a name; None where there is nothing."""
    reader = FileSystemReader(checkpoint)
    entry = reader.read_metadata().state_dict_metadata.get(f"extra.{name}")
    if not isinstance(entry, TensorStorageMetadata):
        return None
    content = {f"extra.{name}": torch.empty(entry.size, dtype=torch.uint8)}
    with _alone():
        dcp.load(content, storage_reader=reader, no_dist=True)  # type: ignore[attr-defined]
    return content[f"extra.{name}"].numpy().tobytes()


def write_init(model: nn.Module, folder: Path) -> None:
    """Write the weights of a model, for ``--init``."""
    save_tensors({f"weights.{name}": p.detach() for name, p in model.named_parameters()}, folder)


def save_tensors(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write tensors as torch.distributed.checkpoint does; what ranks share is written once."""
    with _alone() as alone:
        dcp.save(dict(tensors), checkpoint_id=folder, no_dist=alone)  # type: ignore[attr-defined]


@contextlib.contextmanager
def _alone() -> Iterator[bool]:
    """Yield whether this is a run on one process, of which DCP would warn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield not dist.is_initialized()
