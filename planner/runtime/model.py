"""The user's model file: how its model is built and called, and the functions it may have."""

import contextlib
import functools
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .processes import RunError
from .trees import Args, Function, Kwargs, Tree, cast_floats

ARGUMENTS = {
    "data_loader": ("rank", "world_size", "microbatch_size", "seed"),
    "configure_optimizer": ("named_parameters",),
    "lr_schedule": ("step",),
    "evaluate": ("model", "step"),
}
"""What functions of a model file get that it may have for training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserModel:
    """Where the model comes from: a file or an importable module, and a function in it."""

    file: Path | None = None  # or a module is named
    module: str | None = None
    folder: Path | None = None  # that the module lies in, None for an installed one
    original: Path | None = None  # of a copied file, taken while it is there: code may look beside
    factory: str  # function that builds the model
    seq_len: int | None = None  # for ``example_batch``, None for its default
    functions: Mapping[str, Function] = field(default_factory=dict, compare=False)
    """Functions that take the place of those of the file, by name."""

    def function(self, name: str, default: Function = None, *, needed_by: str = "") -> Function:
        """Return a function of the model file, or the default where it has none.

        Raises:
            RunError: It takes other arguments, or an option needs it and it is not there.
        """
        found = self.functions.get(name) or getattr(user_module(self), name, default)
        wanted = f"{name}({', '.join(ARGUMENTS.get(name, ()))})"
        if found is None and needed_by:
            raise RunError(f"{needed_by} needs {wanted} in the model file")
        try:
            if found is not None and name in ARGUMENTS:
                inspect.signature(found).bind(*ARGUMENTS[name])
        except TypeError as error:
            raise RunError(f"{name} of the model file must be {wanted}: {error}") from error
        return found

    def example_batch(self, num_samples: int) -> tuple[Tree, Tree]:
        """Return inputs and targets of this many samples, drawn under torch's current seed.

        They are contiguous, as those of a data loader: ``targets.view(-1)`` works on shifted ones.
        """
        extra = {} if self.seq_len is None else {"seq_len": self.seq_len}
        batch = tuple(self.function("example_batch")(num_samples, **extra))
        inputs, targets = tree_map_only(Tensor, Tensor.contiguous, batch)
        return inputs, targets

    def loss(self, output: Tree, targets: Tree) -> Tensor:
        """Return the scalar loss, computed in no less than float32.

        Raises:
            TypeError: The model file has no ``loss_fn`` and the model does not return its loss.
        """
        loss_fn = self.function("loss_fn")
        if loss_fn is not None:
            loss = loss_fn(tree_map_only(Tensor, _at_least_float32, output), targets)
        else:
            loss = _returned_loss(output)
        if not isinstance(loss, Tensor) or loss.ndim != 0:
            raise TypeError(
                f"{self.file or self.module} has no loss_fn(output, targets), and the model "
                f"returns a {type(output).__name__} instead of its loss: add one of the two"
            )
        return loss


def _returned_loss(output: Tree) -> Tree:
    """Return a scalar output, its "loss", or the one scalar in a tuple of outputs."""
    if isinstance(output, Mapping):
        return output.get("loss")
    if isinstance(output, tuple | list) and not hasattr(output, "loss"):
        scalars = [t for t in output if isinstance(t, Tensor) and t.ndim == 0]
        return scalars[0] if len(scalars) == 1 else None
    return getattr(output, "loss", output)


def _at_least_float32(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


@functools.cache
def user_module(model: UserModel) -> ModuleType:
    """Import the file or module of a model, once."""
    if model.file is None:
        if model.folder is not None:
            sys.path.insert(0, str(model.folder))
        return importlib.import_module(str(model.module))
    file = model.file.resolve()
    if model.original is not None and model.original.is_file():
        file = model.original.resolve()
    spec = importlib.util.spec_from_file_location(f"user_model_{file.stem}", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise RunError(f"the model file {file} is not there: set MODEL in the script")
    sys.path.insert(0, str(file.parent))  # files that the model file imports
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def in_one_thread() -> Iterator[None]:
    """Compute with one thread: with more, decompositions (orthogonal weights) round otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def build_model(model: UserModel, seed: int) -> nn.Module:
    """Build the whole model on the CPU under a seed: the same weights for every layout."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        factory = model.function(model.factory)
        with in_one_thread():
            built: nn.Module = factory()
    return built


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of parameters, gradients and optimiser states for a compute dtype."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Give a model the dtypes it is trained in: frozen parameters that of compute.

    No update is lost on these in a narrow dtype, and FSDP2 takes them in one group with others.
    """
    real = master_dtype(dtype)
    model._apply(  # type: ignore[no-untyped-call]  # ``to`` would make complex numbers real
        lambda t: t.to(real.to_complex()) if t.is_complex() else cast_floats(t, real)
    )
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = cast_floats(parameter.data, dtype)
    return model


def first_names(model: nn.Module) -> Mapping[str, str]:
    """Return the first name of a parameter by each of its names (tied ones have several)."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(parameter), name) for name, parameter in named}


def arguments_of(inputs: Tree) -> tuple[Args, Kwargs]:
    """Return the arguments of a model: one tensor, a tuple of them, or a dict of keyword ones."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}


def run_model(model: nn.Module, inputs: Tree) -> Tree:
    """Call the model with the inputs of a microbatch."""
    args, kwargs = arguments_of(inputs)
    return model(*args, **kwargs)
