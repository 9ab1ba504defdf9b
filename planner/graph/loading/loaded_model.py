"""A model with its data and loss, ready to be built without weights."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from planner.errors import ModelError, RequestError
from planner.graph import torch_private
from planner.graph.loading.batch import Batch, describe, take_batch
from planner.graph.loading.build import (
    BuiltModel,
    build_on_meta,
    first_buffers,
)
from planner.graph.loading.devices import DeviceMode
from planner.graph.loading.fixed_seed import fixed_seed
from planner.graph.loading.hints import Hint
from planner.graph.loading.user_code import user_code

DEFAULT_FACTORY = "build_model"

UserObject: TypeAlias = Any
"""Whatever user code takes or returns."""

FACTORY_LINES = """Add to the model file:
    def build_model():
        return MyModel()"""

_TARGETS_LINES = """It computes its loss where it is given targets. Let them be inputs:
    def example_batch(microbatch_size):
        tokens = torch.randint(0, VOCAB_SIZE, (microbatch_size, SEQ_LEN + 1))
        return (tokens[:, :-1], tokens[:, 1:]), None  # arguments of forward, no targets"""

_LOSS_LINES = """Add to the model file:
    def loss_fn(output, targets):
        return torch.nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that can be built without weights, with its data and loss."""

    description: str
    """What the user named, for messages."""
    file: str | None
    """Path of the model file, or of the Hugging Face config, as the user gave it."""
    module: str | None
    """Module name where the user gave ``package.module:factory``."""
    factory: str
    """Name of the function that builds the model, "" for a module passed as an object."""
    seq_len: int | None
    """``seq_len`` that the user asked for and ``example_batch`` takes."""
    make_model: Callable[[], nn.Module]
    """Builds the model; user code."""
    make_batch: Callable[..., Any]
    """Makes (inputs, targets) of a microbatch size, and of a ``seq_len`` where it takes one; user
    code."""
    loss_fn: Callable[[Any, Any], Any] | None
    """Loss of (output, targets); None where the model returns its loss."""
    import_scope: Callable[[], AbstractContextManager[None]] = nullcontext
    """Makes the model file's own imports work while its code runs."""
    notes: tuple[str, ...] = ()
    """What the user should know of how the model was chosen."""
    hints: tuple[Hint, ...] = ()
    """What lines of the model read from tensors that have no data."""

    @contextmanager
    def running(self, action: str) -> Iterator[None]:
        """Run the model's code: its imports work, what it raises becomes a ``ModelError``."""
        with user_code(action), self.import_scope():
            yield

    def build_meta(self, dtype: str) -> BuiltModel:
        """Build the model in train mode on the meta device; no weights are allocated.

        As in the training script, modules are built in float32 (float64 where the compute dtype
        is float64) and parameters are then cast to the compute dtype; buffers keep theirs.

        Args:
            dtype: Compute dtype, as torch spells it: "bfloat16".

        Raises:
            ModelError: The factory raises, returns no module, or a module without a parameter
                that needs a gradient.
        """
        compute = _floating_dtype(dtype)
        with self.running(f"Building {self.description}"), default_dtype(compute):
            built = build_on_meta(self.make_model, self.description)
        parameters = list(built.module.parameters())
        if not any(parameter.requires_grad for parameter in parameters):
            raise ModelError(
                f"{self.description} has no parameter that requires a gradient: there is nothing"
                " to train.",
                hint="Return the model with requires_grad=True on the parameters to train.",
            )
        for parameter in parameters:
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(compute)
        built.module.train()
        return built

    def first_buffers(self, dtype: str) -> dict[str, Tensor]:
        """Return the data that small buffers have at first, where it can be had."""
        with self.import_scope(), default_dtype(_floating_dtype(dtype)):
            return first_buffers(self.make_model)

    def example_batch(self, microbatch_size: int) -> Batch:
        """Make a microbatch, with real data, under a fixed seed.

        Raises:
            ModelError: ``example_batch`` raises, or returns what cannot be cut into microbatches.
        """
        with (
            self.running(f"Calling example_batch({microbatch_size})"),
            fixed_seed(),
            DeviceMode("cpu"),
        ):
            if self.seq_len is None:
                made = self.make_batch(microbatch_size)
            else:
                made = self.make_batch(microbatch_size, seq_len=self.seq_len)
        return take_batch(made, microbatch_size)

    def with_seq_len(self, seq_len: int) -> "LoadedModel":
        """Return the same model with data of another length.

        Raises:
            RequestError: ``example_batch`` does not take a length.
        """
        check_seq_len(self.make_batch, seq_len)
        return replace(self, seq_len=seq_len)

    def loss(self, output: UserObject, targets: UserObject) -> Tensor:
        """Turn the model's output into the scalar to differentiate.

        A ``loss_fn`` gets 16-bit outputs in float32, as in the script. Without one the model
        returns its loss: a scalar, an object or dict with a ``loss``, or a tuple with exactly
        one scalar floating-point tensor.

        Raises:
            ModelError: The loss function raises, or there is no scalar with a gradient.
        """
        if self.loss_fn is not None:
            with self.running("Calling loss_fn(output, targets)"):
                loss = self.loss_fn(
                    torch_private.tree_map_only(Tensor, _at_least_float32, output), targets
                )
            asked = "loss_fn must return a scalar tensor with a gradient, but it returned"
        else:
            loss = _returned_loss(output)
            asked = "There is no loss_fn, so the model must return its loss, but it returned"
        if not isinstance(loss, Tensor) or loss.dim():
            shown = loss if self.loss_fn is not None else output
            lacks_targets = self.loss_fn is None and _has_no_loss_yet(output)
            hint = _TARGETS_LINES if lacks_targets else _LOSS_LINES
            raise ModelError(f"{asked} {describe(shown)}.", hint=hint)
        if not loss.requires_grad:
            raise ModelError(
                f"{asked} {describe(loss)}: it depends on no parameter that needs one.",
                hint="Look for .detach(), .item(), torch.no_grad() or integers between the"
                " parameters and the loss.",
            )
        return loss


@contextmanager
def default_dtype(compute: torch.dtype) -> Iterator[None]:
    """Create tensors as the training script does: float64 for float64, else float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if compute == torch.float64 else torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _floating_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise RequestError(
            f"dtype {name!r} is no floating-point type of torch.",
            hint='Use "bfloat16", "float32" or "float64".',
        )
    return dtype


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def check_seq_len(make_batch: Callable[..., Any], seq_len: int | None) -> None:
    """Check that data of a length can be asked for.

    Raises:
        RequestError: A length is given and the function takes none.
    """
    parameters = inspect.signature(make_batch).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    if seq_len is not None and "seq_len" not in parameters and not takes_any:
        raise RequestError(
            f"--seq-len {seq_len} was asked for, but example_batch takes no seq_len: its"
            f" parameters are ({', '.join(parameters)}).",
            hint="Drop --seq-len, or add the parameter:"
            " def example_batch(microbatch_size, seq_len=1024).",
        )


def _has_no_loss_yet(output: UserObject) -> bool:
    """Tell whether a place for the loss is empty: ``(logits, None)``, ``loss=None``."""
    if isinstance(output, dict):
        return output.get("loss", output) is None
    if isinstance(output, (tuple, list)):
        return any(item is None for item in output)
    return getattr(output, "loss", output) is None


def _returned_loss(output: UserObject) -> UserObject:
    if isinstance(output, dict) and "loss" in output:
        return output["loss"]
    if isinstance(output, Tensor):
        return output
    if (loss := getattr(output, "loss", None)) is not None:
        return loss
    if isinstance(output, (tuple, list)):
        scalars = [
            item
            for item in output
            if isinstance(item, Tensor) and item.dim() == 0 and item.is_floating_point()
        ]
        return scalars[0] if len(scalars) == 1 else output
    return output
