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

from .fused import gather_parts, scatter_parts
from .model import UserModel, build_on_cpu
from .options import Options
from .part import named_parameters


@dataclass(slots=True)
class Checkpointer:
    """Saves and loads weights, AdamW moments of the trained ones, and the step."""

    modules: Sequence[nn.Module]
    """This rank's stages, or the plain model."""
    optimizers: Sequence[torch.optim.Optimizer]
    """AdamW over their trained parameters."""

    def save(self, folder: Path, step: int) -> None:
        """Write the state after ``step`` steps into a folder of its own below ``folder``."""
        state, _ = self._state(step)
        _write(state, folder / f"step-{step:08d}")

    def save_if_due(self, options: Options, step: int) -> None:
        """Save where ``--checkpoint`` is given and this is the last step or one in between."""
        every = options.checkpoint_every
        if options.checkpoint is None:
            return
        if step == options.steps or (every and step % every == 0):
            self.save(options.checkpoint, step)

    def resume(self, folder: Path | None) -> int:
        """Load the newest checkpoint below ``folder``.

        Returns:
            The number of steps that it has seen.

        Raises:
            FileNotFoundError: There is no complete checkpoint.
        """
        found = folder.glob("step-*/.metadata") if folder is not None else ()
        saved = sorted(path.parent for path in found)
        if not saved:
            raise FileNotFoundError(f"{folder} holds no complete checkpoint to resume from")
        step = int(saved[-1].name.removeprefix("step-"))
        state, joined = self._state(step)
        _read(state, saved[-1])
        for kind, parts in joined.items():
            scatter_parts(state[kind], parts)
        return step

    def load_weights(self, checkpoint: Path) -> None:
        """Load weights only, from a checkpoint of one step or from ``--write-init``."""
        values = dict(item for module in self.modules for item in named_parameters(module))
        whole, joined = gather_parts(self.modules, values)
        _read({"weights": whole}, checkpoint)
        scatter_parts(whole, joined)

    def _state(self, step: int) -> tuple[dict[str, Any], dict[str, dict[str, list[Tensor]]]]:
        """Return the state to save or to load into, and the parts of joined tensors."""
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
        state: dict[str, Any] = {}
        joined: dict[str, dict[str, list[Tensor]]] = {}
        for kind, values in kinds.items():
            state[kind], joined[kind] = gather_parts(self.modules, values)
        return state, joined


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


def write_init(model: UserModel, seed: int, options: Options) -> None:
    """Build the model on this process and write its weights to ``--write-init DIR``."""
    assert options.write_init is not None
    built = build_on_cpu(model, seed, options)
    weights = {name: parameter.detach() for name, parameter in built.named_parameters()}
    _write({"weights": weights}, options.write_init)
