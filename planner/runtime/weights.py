"""First weights, one tensor at a time: no process holds the whole model."""

import contextlib
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from .checkpoint_folders import check_checkpoint
from .first_weights import DeferredInit
from .processes import RunError
from .trees import Function

INDEX_NAME = "model.safetensors.index.json"
"""Says in which file of several a tensor lies, as Hugging Face writes it."""

PREFIXES = ("weights.", "model.", "")
"""What names in a checkpoint of torch begin with: ours, torchtitan's and others', plain ones."""

MOST_NAMES = 5
"""Names that a message lists."""


class Weights(Protocol):
    """Where first weights come from."""

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors on the CPU, one at a time; names are the user's first ones."""


class DrawnWeights:
    """The weights that the model's own code draws, made again tensor by tensor."""

    def __init__(self, deferred: DeferredInit, model: nn.Module) -> None:
        """Take the parameters of a model that was just built."""
        self._deferred = deferred
        self._parameters = {name: p.detach() for name, p in model.named_parameters()}

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters as one process would draw them."""
        for name in names:
            parameter = self._parameters[name]
            yield name, self._deferred.value(parameter) if parameter.is_meta else parameter


class SafetensorsWeights:
    """Weights in one file of safetensors, or in several with an index."""

    def __init__(self, path: Path, model: nn.Module) -> None:
        """Look what there is, and compare it with the model.

        Args:
            path: A ``.safetensors`` file, an index, or the folder of one of them.
            model: The whole model; its persistent buffers are read at once.

        Raises:
            RunError: safetensors is not installed, or names or shapes differ.
        """
        self._open = _safe_open()
        files = _safetensors_files(path)
        self._file_of: dict[str, Path] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            with self._reading(file) as opened:
                for name in opened.keys():  # noqa: SIM118 - no mapping
                    self._file_of[name] = file
                    shapes[name] = tuple(opened.get_slice(name).get_shape())
        self._stored = stored_names(path, model, shapes)
        buffers = {name: buffer for name, buffer in model.named_buffers() if name in shapes}
        for name, buffer in buffers.items():
            buffer.copy_(self._read(name))

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors as they are in the files."""
        for name in names:
            yield name, self._read(self._stored[name])

    def _read(self, stored: str) -> Tensor:
        with self._reading(self._file_of[stored]) as opened:
            tensor: Tensor = opened.get_tensor(stored)
            return tensor

    @contextlib.contextmanager
    def _reading(self, file: Path) -> Iterator[Any]:
        try:
            opened = self._open(str(file), framework="pt", device="cpu")
        except Exception as error:  # safetensors raises its own, without a common class
            raise RunError(f"--init: {file} cannot be read: {error}") from error
        with opened as handle:
            yield handle


class CheckpointWeights:
    """Weights in a folder that torch.distributed.checkpoint has written."""

    def __init__(self, path: Path, model: nn.Module) -> None:
        """Look what there is, and compare it with the model.

        Raises:
            RunError: The checkpoint is not whole, or names or shapes differ.
        """
        check_checkpoint(path)
        entries = FileSystemReader(path).read_metadata().state_dict_metadata
        tensors = {n: e for n, e in entries.items() if isinstance(e, TensorStorageMetadata)}
        own = {name for name, _ in model.named_parameters()}
        prefix = max(PREFIXES, key=lambda each: sum(f"{each}{name}" in tensors for name in own))
        shapes = {
            name.removeprefix(prefix): tuple(entry.size)
            for name, entry in tensors.items()
            if name.startswith(prefix)
        }
        self._path = path
        self._entries = tensors
        self._stored = {
            name: f"{prefix}{stored}"
            for name, stored in stored_names(path, model, shapes, foreign=not prefix).items()
        }

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors as they are in the folder."""
        for name in names:
            stored = self._stored[name]
            entry = self._entries[stored]
            state = {stored: torch.empty(entry.size, dtype=entry.properties.dtype)}
            reader = FileSystemReader(self._path)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load(state, storage_reader=reader, no_dist=True)  # type: ignore[attr-defined]
            yield name, state[stored]


def open_weights(path: Path, model: nn.Module) -> Weights:
    """Find out what ``--init`` names.

    Args:
        path: A file or folder of safetensors, or a folder of torch.distributed.checkpoint.
        model: The whole model, whose parameters may be on the meta device.

    Raises:
        RunError: It is neither, or does not fit the model.
    """
    if not path.exists():
        raise RunError(f"--init: {path} is not there")
    if (path / ".metadata").is_file():
        return CheckpointWeights(path, model)
    return SafetensorsWeights(path, model)


def stored_names(
    path: Path,
    model: nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    foreign: bool = False,
) -> dict[str, str]:
    """Match the parameters of a model with stored tensors.

    Args:
        path: What was read, for the message.
        model: The whole model.
        shapes: Shape of each stored tensor by its name.
        foreign: Other things than weights may be stored too.

    Returns:
        The stored name of each parameter by its first name; any name of a tied one will do.

    Raises:
        RunError: Parameters are missing, or there are others, or of other shapes.
    """
    first_by_id: dict[int, str] = {}
    found: dict[str, str] = {}
    wrong = []
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        first = first_by_id.setdefault(id(parameter), name)
        if name in shapes and first not in found:
            found[first] = name
            if shapes[name] != tuple(parameter.shape):
                wrong.append(f"{name} {shapes[name]} instead of {tuple(parameter.shape)}")
    missing = [name for name in first_by_id.values() if name not in found]
    known = parameters.keys() | dict(model.named_buffers()).keys()
    unexpected = [] if foreign else [name for name in shapes if name not in known]
    lines = [
        f"{words}: {_listed(names)}"
        for words, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape", wrong),
        )
        if names
    ]
    if lines:
        raise RunError(f"--init: {path} does not fit the model\n  " + "\n  ".join(lines))
    return found


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _safetensors_files(path: Path) -> list[Path]:
    index = path / INDEX_NAME if path.is_dir() else path
    if index.name.endswith(".json") and index.is_file():
        content = json.loads(index.read_text(encoding="utf-8"))
        files = [index.parent / name for name in sorted(set(content["weight_map"].values()))]
    elif path.is_dir():
        files = sorted(path.glob("*.safetensors"))
    else:
        files = [path]
    gone = [str(file) for file in files if not file.is_file()]
    if gone or not files:
        lacking = ", ".join(gone) or f"{INDEX_NAME}, *.safetensors or .metadata"
        raise RunError(f"--init: {path} lacks {lacking}")
    return files


def _safe_open() -> Function:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise RunError(
            "--init: safetensors is not installed, which reads such files: pip install safetensors"
        ) from error
    return safe_open
