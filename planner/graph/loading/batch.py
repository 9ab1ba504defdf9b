"""One microbatch of the user's data, and whether model and script can take it."""

import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from planner.errors import ModelError
from planner.graph import torch_private

BATCH_LINES = """Add to the model file:
    def example_batch(microbatch_size):
        tokens = torch.randint(0, VOCAB_SIZE, (microbatch_size, SEQ_LEN + 1))
        return tokens[:, :-1], tokens[:, 1:]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One microbatch as the model takes it."""

    args: tuple[Any, ...]
    """Positional arguments."""
    kwargs: dict[str, Any]
    """Keyword arguments."""
    targets: Any
    """Second argument of the loss function."""

    @property
    def words(self) -> str:
        """What it holds: "a tensor of shape (2, 8), mask=a tensor of shape (2, 8)"."""
        named = (f"{name}={describe(value)}" for name, value in self.kwargs.items())
        return ", ".join((*map(describe, self.args), *named)) or "nothing"


def take_batch(made: object, microbatch_size: int) -> Batch:
    """Take what ``example_batch`` returned apart.

    Raises:
        ModelError: It is no pair, or a tensor's first dim is not the microbatch: microbatches,
            and the shares of data-parallel ranks, are slices of that dim.
    """
    if not isinstance(made, (tuple, list)) or len(made) != 2:
        raise ModelError(
            f"example_batch must return (inputs, targets), but it returned {describe(made)}.",
            hint="inputs is a tensor, a tuple of positional or a dict of keyword arguments;"
            " return None as targets where the model computes its loss from its inputs.\n"
            + BATCH_LINES,
        )
    inputs, targets = made
    for tensor in torch_private.tree_leaves((inputs, targets)):
        if isinstance(tensor, Tensor) and tensor.shape[:1] != (microbatch_size,):
            raise ModelError(
                f"example_batch({microbatch_size}) returned a tensor of shape"
                f" {tuple(tensor.shape)}: its first dim must be the samples ({microbatch_size}),"
                " since microbatches are cut from that dim.",
                hint="Put the batch first (and transpose in forward), make tensors that all"
                " samples share in forward or as buffers, and use microbatch_size as it is given.",
            )
    if isinstance(inputs, dict):
        return Batch(args=(), kwargs=dict(inputs), targets=targets)
    args = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    return Batch(args=args, kwargs={}, targets=targets)


def check_call(module: nn.Module, batch: Batch) -> None:
    """Check that the inputs fit the parameters of the model's forward.

    Raises:
        ModelError: One is missing, or there are too many.
    """
    try:
        signature = inspect.signature(module.forward)
    except ValueError:
        return  # scripted modules have none
    try:
        signature.bind(*batch.args, **batch.kwargs)
    except TypeError as error:
        raise ModelError(
            f"The inputs of example_batch do not fit forward{signature} of"
            f" {type(module).__name__}: {error}.",
            hint=f"example_batch returns {batch.words} as inputs; a tuple is passed as positional,"
            " a dict as keyword arguments.",
        ) from error


def describe(thing: object) -> str:
    """Say in words what user code returned."""
    if isinstance(thing, Tensor):
        grad = "" if thing.requires_grad else " without a gradient"
        return f"a tensor of shape {tuple(thing.shape)}{grad}"
    if isinstance(thing, (tuple, list)):
        return f"a {type(thing).__name__} of {len(thing)}"
    return f"{type(thing).__name__}"
