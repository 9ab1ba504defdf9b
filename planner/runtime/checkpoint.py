"""Checkpoints under the user's own parameter names, readable in any other layout."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from .checkpoint_folders import checkpoint_folder, keep_newest, published, step_of
from .model import UserModel, build_on_cpu
from .options import Options
from .part import StoredOrder, named_parameters
from .processes import agreed
from .weights import Weights


@dataclass(slots=True)
class Checkpointer:
    """Saves and loads weights, AdamW moments of the trained ones, and the step."""

    modules: Sequence[nn.Module]
    """This rank's stages, or the plain model."""
    optimizers: Sequence[torch.optim.Optimizer]
    """AdamW over their trained parameters."""

    def save(self, folder: Path, step: int) -> None:
        """Write the state after ``step`` steps into a folder of its own below ``folder``.

        Raises:
            RunError: The folder cannot be written; earlier checkpoints stay as they are.
        """
        state = self._in_user_order(self._values(step))
        with published(checkpoint_folder(folder, step)) as draft:
            _write(state, draft)

    def end_step(self, options: Options, step: int, *, stops: bool) -> None:
        """Save where ``--checkpoint`` is given and this is the last step or one in between."""
        if options.checkpoint is None:
            return
        every = options.checkpoint_every
        if stops or step == options.steps or (every and step % every == 0):
            self.save(options.checkpoint, step)
            keep_newest(options.checkpoint, options.keep_checkpoints)

    def start(self, weights: Weights | None, checkpoint: Path | None) -> int:
        """Fill in what the model still lacks: a checkpoint, or first weights.

        Returns:
            The number of steps that the checkpoint has seen, else 0.

        Raises:
            RunError: The checkpoint is of another model or optimiser.
        """
        if checkpoint is not None:
            step = step_of(checkpoint)
            with agreed(f"{checkpoint} cannot be resumed from"):
                self._load(self._values(step), checkpoint)
            return step
        if weights is not None:
            with agreed("the first weights"):
                for module in self.modules:
                    fill_weights(module, weights)
        return 0

    @property
    def _orders(self) -> dict[str, StoredOrder]:
        return {
            name: order
            for module in self.modules
            for name, order in getattr(module, "orders", {}).items()
        }

    def _in_user_order(self, values: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
        """Return values as a checkpoint has them."""
        orders = self._orders
        return {
            kind: {
                name: orders[name].in_user_order(value.detach())
                if name in orders
                else value.detach()
                for name, value in named.items()
            }
            for kind, named in values.items()
        }

    def _load(self, values: dict[str, dict[str, Tensor]], checkpoint: Path) -> None:
        """Read values from a checkpoint, in place."""
        state = self._in_user_order(values)
        _read(state, checkpoint)
        for name, order in self._orders.items():
            for kind, named in values.items():
                if name in named:
                    order.restore(state[kind][name], named[name].detach())

    def _values(self, step: int) -> dict[str, dict[str, Tensor]]:
        """Return weights and moments by the user's names."""
        kinds: dict[str, dict[str, Tensor]] = {"weights": {}, "exp_avg": {}, "exp_avg_sq": {}}
        optimizer_of = {
            id(parameter): optimizer
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for module in self.modules:
            for name, parameter in named_parameters(module):
                kinds["weights"][name] = parameter
                if not parameter.requires_grad:
                    continue  # frozen: it has no moments
                moments = adamw_state(optimizer_of[id(parameter)], parameter, step)
                kinds["exp_avg"][name] = moments["exp_avg"]
                kinds["exp_avg_sq"][name] = moments["exp_avg_sq"]
        return kinds


def _write(state: dict[str, Any], folder: Path) -> None:
    with _quiet_on_one_process() as alone:
        dcp.save(state, checkpoint_id=folder, no_dist=alone)  # type: ignore[attr-defined]


def _read(state: dict[str, Any], folder: Path) -> None:
    with _quiet_on_one_process() as alone:
        dcp.load(state, checkpoint_id=folder, no_dist=alone)  # type: ignore[attr-defined]


@contextlib.contextmanager
def _quiet_on_one_process() -> Iterator[bool]:
    """Yield whether this is a run on one process, of which DCP would warn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield not dist.is_initialized()


def adamw_state(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, step: int
) -> dict[str, Tensor]:
    """Return AdamW's state of a parameter; where it has none, zeros after ``step`` steps."""
    state: dict[str, Tensor] = optimizer.state[parameter]
    if not state:
        state["step"] = torch.tensor(float(step), device=parameter.device)
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    return state


def fill_weights(module: nn.Module, weights: Weights) -> None:
    """Give each parameter this rank's share of its weight, tensor by tensor."""
    parameters = dict(named_parameters(module))
    orders: dict[str, StoredOrder] = getattr(module, "orders", {})
    for name, full in weights.tensors(parameters):
        ordered = orders[name].by_rank(full) if name in orders else full
        _copy_share(ordered, parameters[name].detach())


def _copy_share(full: Tensor, parameter: Tensor) -> None:
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        on_device = full.to(parameter.device, parameter.dtype)
        share = distribute_tensor(on_device, mesh, placements, src_data_rank=None)
        parameter._local_tensor.copy_(share._local_tensor)
    else:
        parameter.copy_(full)


def write_init(model: UserModel, seed: int, options: Options) -> None:
    """Build the model on this process and write its weights to ``--write-init DIR``."""
    assert options.write_init is not None
    built = build_on_cpu(model, seed, options)
    weights = {name: parameter.detach() for name, parameter in built.named_parameters()}
    _write({"weights": weights}, options.write_init)
