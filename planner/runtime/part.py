"""What a rank trains: the user's model, or one pipeline stage of it."""

import functools
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from .model import first_names, run_model
from .processes import RunError
from .trees import Tree


class OffersLoss(Protocol):
    """What a model is trained for."""

    def loss(self, output: Tree, targets: Tree) -> Tensor:
        """Return the scalar loss."""


class StoredOrder(Protocol):
    """How a parameter is held that checkpoints have in another order."""

    def by_rank(self, tensor: Tensor) -> Tensor:
        """Return a whole tensor of the user's order in the one that it is held in."""

    def in_user_order(self, value: Tensor) -> Tensor:
        """Return what a checkpoint has of it."""

    def restore(self, saved: Tensor, value: Tensor) -> None:
        """Copy what ``in_user_order`` returned back."""


class Part(nn.Module):
    """The user's model under ``model``, which runs from its inputs to the loss."""

    def __init__(
        self,
        model: nn.Module,
        user: OffersLoss,
        *,
        blocks: Sequence[str],
        recompute: Sequence[str] = (),
    ) -> None:
        """Take the model as it is.

        Args:
            model: The whole model, or the part of it that is left of it.
            user: Offers the loss.
            blocks: Paths of the blocks that run here.
            recompute: "none", "selective" or "full" for each of them; empty for none at all.
        """
        super().__init__()
        self.model = model
        self.user = user
        self.blocks = tuple(blocks)
        self.recompute = tuple(recompute)
        self.device = torch.device("cpu")
        self.first_names = first_names(model)
        self.orders: dict[str, StoredOrder] = {}
        self.stays_sharded = False
        self.has_weights = True
        for parameter in model.parameters():
            if not parameter.numel():  # nothing to train, and FSDP2 reduces no empty gradients
                parameter.requires_grad_(False)  # noqa: FBT003

    def block_items(self) -> list[tuple[str, nn.Module]]:
        """Return path and module of the blocks that run here."""
        return [(path, self.model.get_submodule(path)) for path in self.blocks]

    def forward(self, *, inputs: Tree, targets: Tree) -> Tensor:
        """Run one microbatch and return its scalar loss."""
        return self.user.loss(run_model(self.model, inputs), targets)

    def holds(self, module: nn.Module) -> bool:
        """Say whether a module of the model runs here."""
        return True

    def move_to(self, device: torch.device) -> None:
        """Move parameters and buffers to the device; parameters on meta stay there for now.

        Raises:
            RunError: A buffer has no values.
        """
        for name, buffer in self.model.named_buffers():
            if buffer.is_meta:
                raise RunError(f"buffer {name} lies on the meta device: build it with its values")
        self.device = device
        self._apply(functools.partial(_moved, device=device))  # type: ignore[no-untyped-call]

    def materialise(self) -> None:
        """Allocate parameters that are still on the meta device; they get their values later."""
        self.has_weights = not any(parameter.is_meta for parameter in self.parameters())
        self._apply(  # type: ignore[no-untyped-call]
            lambda t: torch.empty_like(t, device=self.device) if t.is_meta else t
        )

    def saved_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the persistent buffers of the modules that run here, by the user's names."""
        modules = list(self.model.named_modules())
        elsewhere = tuple(f"{path}." for path, module in modules if not self.holds(module))
        for path, module in modules:
            for name, buffer in module._buffers.items():
                saved = buffer is not None and name not in module._non_persistent_buffers_set
                if saved and not f"{path}.".startswith(elsewhere):
                    yield f"{path}.{name}" if path else name, buffer

    def register_late_hooks(self) -> None:
        """Register what looks at outputs of modules, after the hooks that FSDP2 put on them."""

    def prepare_backward(self, *, is_last: bool) -> None:
        """Tell FSDP2 what a microbatch does with gradients and parameters; no pipeline.

        Under ZeRO-3 both lie sharded between microbatches: gradients are reduce-scattered and
        parameters gathered again in each. Else both stay whole until the last microbatch.
        Replicas add up their gradients in the last in any case.
        """
        if isinstance(self, FSDPModule):  # which fully_shard makes of it
            sharded = is_last or self.stays_sharded
            self.set_requires_gradient_sync(sharded)
            self.set_reshard_after_backward(sharded)
            self.set_requires_all_reduce(is_last)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor; one element that is expanded to many stays one."""
    if tensor.is_meta:
        return tensor
    if any(tensor.stride()) or tensor.numel() <= 1:
        return tensor.to(device)
    return torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)


def named_parameters(part: Part) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters under the first name that the user's model has for them."""
    for name, parameter in part.model.named_parameters():
        yield part.first_names.get(name, name), parameter
