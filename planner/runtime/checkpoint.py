"""What a checkpoint holds, under the user's own parameter names: readable in any other layout.

Also weights in files that others have written. Of all of these each rank reads what it holds.
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import Optimizer

from .checkpoint_folders import missing_in
from .part import Part, named_parameters
from .processes import RunError, agreed

Values: TypeAlias = dict[tuple[str, str], Tensor]
"""Tensors by kind ("weights", "exp_avg") and the user's name; a checkpoint joins these by a dot."""

MODEL_KINDS = {"weights", "buffers", "extra"}
"""Kinds that are no state of an optimiser."""

INDEX_NAME = "model.safetensors.index.json"
"""Says in which file of several a tensor lies, as Hugging Face writes it."""

PREFIXES = ("weights.", "model.", "")
"""What names in a checkpoint of torch begin with: ours, torchtitan's and others', plain ones."""

MOST_NAMES = 5  # that a message lists


def state_of(parts: Sequence[Part], optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """Return what a checkpoint holds of this rank, by name: weights, buffers, optimiser states."""
    values: Values = {}
    with agreed("the state cannot be saved"):
        for part in parts:
            values |= _in_user_order(part, _of_model(part) | _of_optimizers(part, optimizers))
    return {".".join(key): value for key, value in values.items()}


def load_state(parts: Sequence[Part], optimizers: Sequence[Optimizer], checkpoint: Path) -> None:
    """Read a checkpoint in place. What it has no state of starts without one."""
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
    """Read the model alone, from safetensors or a checkpoint of torch."""
    with agreed(f"{path} cannot be read"):
        reader, stored = _open_weights(path, parts[0])
        for part in parts:
            values = {key: each for key, each in _of_model(part).items() if key[1] in stored}
            _read(reader, part, values, {key: stored[key[1]] for key in values})


def _of_model(part: Part) -> Values:
    weights: Values = {("weights", name): p.detach() for name, p in named_parameters(part)}
    return weights | {("buffers", name): buffer for name, buffer in part.saved_buffers()}


def _of_optimizers(part: Part, optimizers: Sequence[Optimizer]) -> Values:
    """Return what optimisers keep: tensors of the parameter's shape, or numbers, else an error."""
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
        if name in part.orders and value.ndim
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


class _Safetensors(HuggingFaceStorageReader):
    """Reads chosen files: others in their folder may hold the same tensors again."""

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__(str(files[0].parent))
        self.fs.ls = lambda path: [str(f) for f in files]  # type: ignore[method-assign]


def _open_weights(path: Path, part: Part) -> tuple[FileSystemReader, dict[str, str]]:
    """Return a reader, and the stored name of each parameter and buffer by its (first) name.

    Raises:
        RunError: It cannot be read, or names or shapes are not those of the whole model.
    """
    shapes, first_names = part.shapes, part.first_names
    is_checkpoint = (path / ".metadata").is_file()
    if is_checkpoint and (missing := missing_in(path)):
        raise RunError(f"{path} is no whole checkpoint: {missing}")
    reader = FileSystemReader(path) if is_checkpoint else _Safetensors(_files(path))
    try:
        entries = reader.read_metadata().state_dict_metadata
    except ImportError as error:
        raise RunError(f"{path} needs safetensors: pip install safetensors") from error
    except Exception as error:  # safetensors raises its own, without a common class
        raise RunError(f"{path}: {error}") from error
    sizes = {n: tuple(e.size) for n, e in entries.items() if isinstance(e, TensorStorageMetadata)}

    def num_found(prefix: str) -> int:
        return sum(f"{prefix}{name}" in sizes for name in first_names)

    prefix = max(PREFIXES, key=num_found) if is_checkpoint else ""
    stored = {n.removeprefix(prefix): size for n, size in sizes.items() if n.startswith(prefix)}
    if is_checkpoint and not prefix:  # other things than weights may be stored too
        stored = {name: size for name, size in stored.items() if name in shapes}
    found = {first_names.get(name, name): f"{prefix}{name}" for name in reversed(stored)}
    lines = {
        "missing": [name for name in dict.fromkeys(first_names.values()) if name not in found],
        "unexpected": sorted(stored.keys() - shapes.keys()),
        "of another shape": [
            f"{name} {size} instead of {shapes[name]}"
            for name, size in stored.items()
            if size != shapes.get(name, size)
        ],
    }
    wrong = [f"\n  {words}: {_listed(each)}" for words, each in lines.items() if each]
    if wrong:
        raise RunError(f"{path} does not fit the model{''.join(wrong)}")
    return reader, found


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _files(path: Path) -> list[Path]:
    """Return the files of safetensors that a path stands for."""
    index = path / INDEX_NAME if path.is_dir() else path
    if index.suffix == ".json" and index.is_file():
        content = json.loads(index.read_text(encoding="utf-8"))
        files = [index.parent / name for name in sorted(set(content["weight_map"].values()))]
    else:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    gone = [str(file) for file in files if not file.is_file()]
    if gone or not files:
        lacking = ", ".join(gone) or f"{INDEX_NAME}, *.safetensors or .metadata"
        raise RunError(f"{path} lacks {lacking}")
    return files
