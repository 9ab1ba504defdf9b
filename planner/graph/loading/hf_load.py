"""Loading a Hugging Face config as a model; the model itself is made by ``hf_model``."""

import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from planner.errors import ModelError, RequestError
from planner.graph.loading.loaded_model import DEFAULT_FACTORY, LoadedModel
from planner.graph.loading.user_code import user_code

if TYPE_CHECKING:
    from planner.graph.loading.hf_model import ConfiguredModel

CONFIG_NAME = "config.json"
"""What the folder of a Hugging Face model holds."""

_MODEL_FILE_HINT = (
    "Write a model file that builds the model: build_model() and example_batch(microbatch_size)."
)


def names_config(source: str) -> bool:
    """Tell whether MODEL is a config or a folder, and no Python code."""
    path = Path(source)
    if path.is_dir():
        return (path / CONFIG_NAME).is_file() or not (path / "__init__.py").is_file()
    return path.suffix == ".json"


def load_config(source: str, *, seq_len: int | None = None) -> LoadedModel:
    """Load the model that a Hugging Face config describes, without weights or a download.

    Args:
        source: A ``config.json``, or the folder that holds it.
        seq_len: Tokens per sample, None for the most that the model takes, at most 2048.

    Raises:
        ModelError: transformers is not installed, the config is missing or broken, or it
            describes a model that is not built from its config alone.
        RequestError: The model does not take ``seq_len`` tokens.
    """
    file = Path(source) / CONFIG_NAME if Path(source).is_dir() else Path(source)
    model_type, has_own_code = _read_type(file)
    if importlib.util.find_spec("transformers") is None:
        raise ModelError(
            f"{file} is the config of a Hugging Face model, and transformers is not installed.",
            hint="Install it: pip install 'parallel-training-planner[hf]'.",
        )
    with _quiet(), user_code(f"Building the model of {file}"):
        return _load(file, model_type, seq_len, has_own_code=has_own_code)


def _load(file: Path, model_type: str, seq_len: int | None, *, has_own_code: bool) -> LoadedModel:
    from transformers import CONFIG_MAPPING, __version__

    from planner.graph.loading.hf_model import ConfigError, configured_model

    if model_type not in CONFIG_MAPPING:
        reason = (
            "its code lies in its own repository (auto_map), and downloaded code is not run"
            if has_own_code
            else f"transformers {__version__} has no such type"
        )
        raise ModelError(f"{file} has model_type {model_type!r}: {reason}.", hint=_MODEL_FILE_HINT)
    try:
        model = configured_model(file)
    except ConfigError as error:
        raise ModelError(f"{file}: {error}.", hint=error.hint) from error

    def make_batch(microbatch_size: int) -> object:
        return model.example_batch(microbatch_size)

    if seq_len is not None:
        _check_seq_len(model, seq_len)
    elif model.takes_text:
        seq_len = model.default_seq_len
    return LoadedModel(
        description=f"{file}:{model.class_name}",
        file=str(file),
        module=None,
        factory=DEFAULT_FACTORY,
        seq_len=seq_len,
        make_model=model.build,
        make_batch=model.example_batch if model.takes_text else make_batch,
        loss_fn=None,
        import_scope=_quiet,
        notes=(f"{file}: {model.note}.",) if model.note else (),
    )


def _check_seq_len(model: "ConfiguredModel", seq_len: int) -> None:
    """Check the tokens per sample that are asked for.

    Raises:
        RequestError: The model takes fewer, or no text.
    """
    if not model.takes_text:
        raise RequestError(
            f"--seq-len {seq_len} was asked for, but {model.class_name} takes {model.main_input},"
            f" whose size follows from {model.file}.",
            hint="Drop --seq-len.",
        )
    if model.most_positions is not None and seq_len > model.most_positions:
        raise RequestError(
            f"--seq-len {seq_len} was asked for, but {model.class_name} has a table of"
            f" {model.most_positions} positions.",
            hint=f"Ask for {model.most_positions} or fewer, or enlarge the table in {model.file}.",
        )


def _read_type(file: Path) -> tuple[str, bool]:
    """Read the type of model from a config, and whether it refers to code of its own.

    Raises:
        ModelError: The file is missing or no config.
    """
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(
            f"{file} cannot be read: {error.strerror}.",
            hint="Give a Python file that offers build_model(), the config.json of a Hugging Face"
            " model, or its folder.",
        ) from error
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {error}.", hint="Is the file complete?") from error
    if not isinstance(document, dict) or not isinstance(document.get("model_type"), str):
        raise ModelError(
            f"{file} names no model_type: it is not the config of a Hugging Face model.",
            hint='Such a config holds "model_type": "llama", for example.',
        )
    return document["model_type"], "auto_map" in document


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what transformers has to say off the user's terminal."""
    from transformers.utils.logging import get_verbosity, set_verbosity

    verbosity = get_verbosity()
    set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        set_verbosity(verbosity)
