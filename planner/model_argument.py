"""The model that a call of the library names or passes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from planner.errors import RequestError
from planner.graph.loading.hints import Hint

if TYPE_CHECKING:
    from torch import Tensor, nn

    from planner.graph.loading.loaded_model import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelObject:
    """A model that is passed as an object instead of a file."""

    model: "nn.Module | Callable[[], nn.Module]"
    """Module (meta or real), or a function that builds one."""
    example_batch: Callable[..., Any] | None
    """As a model file's ``example_batch``."""
    loss_fn: "Callable[[Any, Any], Tensor] | None"
    """As a model file's ``loss_fn``."""


def load_argument(
    model: str,
    model_object: ModelObject | None,
    *,
    seq_len: int | None,
    hints: tuple[Hint, ...],
) -> "LoadedModel":
    """Load the model file, or take the object that was passed."""
    from planner.graph.loading.load import load_model, wrap_module

    if model_object is None:
        loaded = load_model(model, seq_len=seq_len)
    else:
        loaded = wrap_module(
            model_object.model,
            example_batch=model_object.example_batch,
            loss_fn=model_object.loss_fn,
            seq_len=seq_len,
        )
    return replace(loaded, hints=hints)


def model_words(model: "str | nn.Module | Callable[[], nn.Module]") -> str:
    """Name a model in the request: the MODEL argument, or what kind of object it is."""
    if isinstance(model, str):
        return model
    name = getattr(model, "__qualname__", None)
    return f"{name} (factory)" if name else f"{type(model).__name__} (nn.Module)"


def model_argument(
    model: "str | nn.Module | Callable[[], nn.Module]",
    example_batch: Callable[..., Any] | None,
    loss_fn: "Callable[[Any, Any], Tensor] | None",
) -> ModelObject | None:
    """Keep a model that is an object together with what a model file would offer.

    Raises:
        RequestError: Neither a path nor a model, or a path with what its file offers itself.
    """
    if isinstance(model, str):
        if example_batch is not None or loss_fn is not None:
            raise RequestError(
                f"model {model!r} is a file, and example_batch or loss_fn was passed too: a "
                "model file offers its own",
                hint="Define them in the model file, or pass the module itself.",
            )
        return None
    if not callable(model):
        raise RequestError(
            f"model is a {type(model).__name__}: it is neither a path, a module nor a function",
            hint='Pass "model.py", an nn.Module, or a function that returns one.',
        )
    return ModelObject(model=model, example_batch=example_batch, loss_fn=loss_fn)
