"""Loading the user's model: the one place that runs user code outside of a trace.

A model file offers::

    def build_model() -> nn.Module: ...
    def example_batch(microbatch_size, seq_len=1024): return inputs, targets   # seq_len optional
    def loss_fn(output, targets): ...        # optional where the model returns its loss
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from planner.errors import ModelError
from planner.graph.loading.batch import BATCH_LINES
from planner.graph.loading.build import (
    check_kind,
    meta_copy,
)
from planner.graph.loading.loaded_model import (
    DEFAULT_FACTORY,
    FACTORY_LINES,
    LoadedModel,
    check_seq_len,
)
from planner.graph.loading.user_code import user_code
from planner.graph.loading.user_module import UserModule, import_user_module


def load_model(
    source: str, *, seq_len: int | None = None, folder: Path | None = None
) -> LoadedModel:
    """Load ``model.py``, ``model.py:factory``, ``package.module:factory`` or a ``config.json``.

    Args:
        source: The MODEL argument.
        seq_len: Sequence length to pass to ``example_batch``, None for its own.
        folder: Folder that a named module may lie in, None for the working directory.

    Raises:
        ModelError: The file is missing, cannot be imported, or offers too little.
        RequestError: ``seq_len`` is given and ``example_batch`` does not take it.
    """
    from planner.graph.loading import hf_load

    if hf_load.names_config(source):
        return hf_load.load_config(source, seq_len=seq_len)
    target, separator, factory = source.rpartition(":")
    if not separator:
        target, factory = source, DEFAULT_FACTORY
    factory = factory or DEFAULT_FACTORY
    with user_code(f"Importing {target}"):
        user_module = import_user_module(target, folder)
    make_model = _required(user_module, factory)
    make_batch = user_module.namespace.get("example_batch")
    if not callable(make_batch):
        raise ModelError(
            f"{target} has no example_batch(microbatch_size), which says what data the model"
            " takes.",
            hint=BATCH_LINES,
        )
    check_seq_len(make_batch, seq_len)
    loss_fn = user_module.namespace.get("loss_fn")
    return LoadedModel(
        description=f"{target}:{factory}",
        file=user_module.file,
        module=user_module.module,
        factory=factory,
        seq_len=seq_len,
        make_model=make_model,
        make_batch=make_batch,
        loss_fn=loss_fn if callable(loss_fn) else None,
        import_scope=user_module.scope.active,
    )


def wrap_module(
    model: nn.Module | Callable[[], nn.Module],
    *,
    example_batch: Callable[..., Any] | None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    seq_len: int | None = None,
) -> LoadedModel:
    """Take a model passed as an object: a module (meta or real) or a factory.

    Args:
        model: A module, which is copied without its weights, or a callable that builds one.
        example_batch: As in a model file.
        loss_fn: As in a model file.
        seq_len: Sequence length to pass to ``example_batch``, None for its own.

    Raises:
        ModelError: ``example_batch`` is missing.
        RequestError: ``seq_len`` is given and ``example_batch`` does not take it.
    """
    if isinstance(model, nn.Module):
        # torch.compile wraps a module; what is traced is the one inside.
        module: nn.Module = getattr(model, "_orig_mod", model)
        description, factory = type(module).__name__, ""

        def make_model() -> nn.Module:
            check_kind(module, description)
            return meta_copy(module)
    else:
        factory = getattr(model, "__name__", type(model).__name__)
        description, make_model = factory, model
    if example_batch is None:
        raise ModelError(
            f"{description} was passed without example_batch, which says what data it takes.",
            hint="Pass example_batch=lambda microbatch_size: (inputs, targets).",
        )
    check_seq_len(example_batch, seq_len)
    return LoadedModel(
        description=description,
        file=None,
        module=None,
        factory=factory,
        seq_len=seq_len,
        make_model=make_model,
        make_batch=example_batch,
        loss_fn=loss_fn,
    )


def _required(user_module: UserModule, factory: str) -> Callable[[], nn.Module]:
    found = user_module.namespace.get(factory)
    if callable(found):
        make: Callable[[], nn.Module] = found
        return make
    offered = user_module.own_callables()
    listing = ", ".join(offered) if offered else "no functions"
    hint = FACTORY_LINES
    if offered:
        hint += f"\nor name one of its callables: {user_module.target}:{offered[0]}"
    raise ModelError(
        f"{user_module.target} has no {factory}(); it offers {listing}.",
        hint=hint,
    )
