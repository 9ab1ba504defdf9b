"""Weights in files that others have written: each rank reads what it holds of them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from .checkpoint_folders import missing_in
from .model import first_names
from .processes import RunError

INDEX_NAME = "model.safetensors.index.json"
"""Says in which file of several a tensor lies, as Hugging Face writes it."""

PREFIXES = ("weights.", "model.", "")
"""What names in a checkpoint of torch begin with: ours, torchtitan's and others', plain ones."""

MOST_NAMES = 5
"""Names that a message lists."""


@dataclass(frozen=True, slots=True)
class ModelNames:
    """What a whole model consists of, as files have it."""

    first: Mapping[str, str]
    """First name of a parameter by each of its names (tied ones have several)."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of parameters and buffers by each of their names."""

    @classmethod
    def of(cls, model: nn.Module) -> "ModelNames":
        """Note the names of a model."""
        parameters = model.named_parameters(remove_duplicate=False)
        shapes = {n: tuple(t.shape) for n, t in (*parameters, *model.named_buffers())}
        return cls(first_names(model), shapes)


class _Safetensors(HuggingFaceStorageReader):
    """Reads chosen files: others in their folder may hold the same tensors again."""

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__(str(files[0].parent))
        self.fs.ls = lambda path: [str(f) for f in files]  # type: ignore[method-assign]


def open_weights(path: Path, names: ModelNames) -> tuple[FileSystemReader, dict[str, str]]:
    """Look what there is, and compare it with the model.

    Args:
        path: A file of safetensors, an index, the folder of one of them, or a folder that
            torch.distributed.checkpoint has written.
        names: What the model consists of.

    Returns:
        A reader, and the stored name of each parameter and buffer by its (first) name.

    Raises:
        RunError: It cannot be read, or names or shapes differ.
    """
    if not path.exists():
        raise RunError(f"{path} is not there")
    is_checkpoint = (path / ".metadata").is_file()
    if is_checkpoint and (missing := missing_in(path)):
        raise RunError(f"{path} is no whole checkpoint: {missing}")
    try:
        reader = FileSystemReader(path) if is_checkpoint else _Safetensors(_files(path))
        metadata = reader.read_metadata()
    except ImportError as error:
        raise RunError(f"{path} needs safetensors: pip install safetensors") from error
    except Exception as error:  # safetensors raises its own, without a common class
        raise error if isinstance(error, RunError) else RunError(f"{path}: {error}") from error
    prefix, stored = _matched(metadata, names, PREFIXES if is_checkpoint else ("",))
    _check(path, names, stored, foreign=is_checkpoint and not prefix)
    found: dict[str, str] = {}
    for name in names.shapes.keys() & stored.keys():
        found.setdefault(names.first.get(name, name), f"{prefix}{name}")
    return reader, found


def _matched(
    metadata: Metadata, names: ModelNames, prefixes: Sequence[str]
) -> tuple[str, dict[str, tuple[int, ...]]]:
    """Return the prefix under which most names are stored, and the shapes there."""
    entries = metadata.state_dict_metadata
    shapes = {n: tuple(e.size) for n, e in entries.items() if isinstance(e, TensorStorageMetadata)}
    prefix = max(prefixes, key=lambda each: sum(f"{each}{name}" in shapes for name in names.first))
    of_prefix = {name for name in shapes if name.startswith(prefix)}
    return prefix, {name.removeprefix(prefix): shapes[name] for name in of_prefix}


def _check(
    path: Path, names: ModelNames, stored: Mapping[str, tuple[int, ...]], *, foreign: bool
) -> None:
    """Compare names and shapes; ``foreign``: other things than weights may be stored too.

    Raises:
        RunError: Parameters are missing, or there are others, or of other shapes.
    """
    found = {names.first.get(name, name) for name in stored}
    unexpected = [] if foreign else sorted(stored.keys() - names.shapes.keys())
    lines = {
        "missing": [name for name in dict.fromkeys(names.first.values()) if name not in found],
        "unexpected": unexpected,
        "of another shape": [
            f"{name} {stored[name]} instead of {shape}"
            for name, shape in names.shapes.items()
            if stored.get(name, shape) != shape
        ],
    }
    wrong = [f"\n  {words}: {_listed(each)}" for words, each in lines.items() if each]
    if wrong:
        raise RunError(f"{path} does not fit the model{''.join(wrong)}")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _files(path: Path) -> list[Path]:
    """Return the files of safetensors that a path stands for."""
    index = path / INDEX_NAME if path.is_dir() else path
    if index.name.endswith(".json") and index.is_file():
        content = json.loads(index.read_text(encoding="utf-8"))
        files = [index.parent / name for name in sorted(set(content["weight_map"].values()))]
    else:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    gone = [str(file) for file in files if not file.is_file()]
    if gone or not files:
        lacking = ", ".join(gone) or f"{INDEX_NAME}, *.safetensors or .metadata"
        raise RunError(f"{path} lacks {lacking}")
    return files
