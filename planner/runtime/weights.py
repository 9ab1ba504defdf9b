"""Weights in files that others have written: each rank reads what it holds of them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from .checkpoint_folders import missing_in
from .processes import RunError

INDEX_NAME = "model.safetensors.index.json"
"""Says in which file of several a tensor lies, as Hugging Face writes it."""

PREFIXES = ("weights.", "model.", "")
"""What names in a checkpoint of torch begin with: ours, torchtitan's and others', plain ones."""

MOST_NAMES = 5
"""Names that a message lists."""

Shapes = Mapping[str, Sequence[int]]
"""Shapes of tensors by name."""


class _Safetensors(HuggingFaceStorageReader):
    """Reads chosen files: others in their folder may hold the same tensors again."""

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__(str(files[0].parent))
        self.fs.ls = lambda path: [str(f) for f in files]  # type: ignore[method-assign]


def open_weights(
    path: Path, shapes: Shapes, first_names: Mapping[str, str]
) -> tuple[FileSystemReader, dict[str, str]]:
    """Look what there is, and compare it with the model.

    Args:
        path: A file of safetensors, an index, the folder of one of them, or a folder that
            torch.distributed.checkpoint has written.
        shapes: Shapes of the whole model's parameters and buffers, by each of their names.
        first_names: First name of a parameter by each of its names (tied ones have several).

    Returns:
        A reader, and the stored name of each parameter and buffer by its (first) name.

    Raises:
        RunError: It cannot be read, or names or shapes differ.
    """
    is_checkpoint = (path / ".metadata").is_file()
    if is_checkpoint and (missing := missing_in(path)):
        raise RunError(f"{path} is no whole checkpoint: {missing}")
    try:
        reader = FileSystemReader(path) if is_checkpoint else _Safetensors(_files(path))
        entries = reader.read_metadata().state_dict_metadata
    except ImportError as error:
        raise RunError(f"{path} needs safetensors: pip install safetensors") from error
    except Exception as error:  # safetensors raises its own, without a common class
        raise error if isinstance(error, RunError) else RunError(f"{path}: {error}") from error
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
            f"{name} {size} instead of {tuple(shapes[name])}"
            for name, size in stored.items()
            if size != tuple(shapes.get(name, size))
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
