"""What a rank trains: the user's model, or one pipeline stage of it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from .model import first_names, run_model
from .processes import RunError
from .trees import Microbatch, Tree


class OffersLoss(Protocol):
    """What a model is trained for."""

    def loss(self, output: Tree, targets: Tree) -> Tensor:
        """Return the scalar loss."""


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
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
        self.shapes = {name: tuple(tensor.shape) for name, tensor in named}
        self.orders: dict[str, Any] = {}  # a StoredOrder, where checkpoints have another than ranks
        self.stays_sharded = False
        self.has_weights = True
        self.seed_draws: Callable[[int], None] = lambda _: None
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
        self._apply(self._moved)  # type: ignore[no-untyped-call]

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.is_meta else tensor.to(self.device)

    def materialise(self) -> None:
        """Allocate parameters that are still on the meta device; they get their values later."""
        self.has_weights = not any(parameter.is_meta for parameter in self.parameters())
        self._apply(  # type: ignore[no-untyped-call]
            lambda t: torch.empty_like(t, device=self.device) if t.is_meta else t
        )

    def saved_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the persistent buffers of the modules that run here, by the user's names."""
        saved = self.model.state_dict(keep_vars=True)
        for name, buffer in self.model.named_buffers(remove_duplicate=False):
            if name in saved:
                yield name, buffer

    def register_late_hooks(self) -> None:
        """Register what looks at outputs of modules, after the hooks that FSDP2 put on them."""


@dataclass(slots=True, kw_only=True)
class Runner:
    """Runs the microbatches of a step on what this rank trains."""

    parts: Sequence[Part]
    """The model, or this rank's stages in model order."""
    num_microbatches: int
    """Microbatches per step."""
    replicas: int = 1
    """Data-parallel ranks whose microbatches it runs one after the other; each draws as it would
    by itself."""

    @property
    def evaluated_together(self) -> int:
        """How many microbatches ``evaluate`` takes."""
        return 1

    def train(self, microbatches: Iterable[Microbatch]) -> list[Tensor]:
        """Accumulate the gradients of their mean loss.

        Under ZeRO-3 gradients and parameters lie sharded between microbatches: the ones are
        reduce-scattered and the others gathered again in each. Else both stay whole until the last
        microbatch. Replicas add up their gradients in the last in any case.

        Returns:
            The loss of each, nothing on ranks without the last stage.
        """
        losses: list[Tensor] = []
        (part,) = self.parts
        for inputs, targets in microbatches:
            is_last = len(losses) == self.num_microbatches - 1
            if isinstance(part, FSDPModule):  # which fully_shard makes of it
                part.set_requires_gradient_sync(is_last or part.stays_sharded)
                part.set_reshard_after_backward(is_last or part.stays_sharded)
                part.set_requires_all_reduce(is_last)
            part.seed_draws(len(losses) % (self.num_microbatches // self.replicas))
            loss = part(inputs=inputs, targets=targets)
            torch.autograd.backward(loss / self.num_microbatches)
            losses.append(loss.detach())
        return losses

    def evaluate(self, microbatches: Iterable[Microbatch]) -> list[Tensor]:
        """Return the loss of each, without gradients; nothing on ranks without the last stage."""
        (part,) = self.parts
        losses: list[Tensor] = []
        for inputs, targets in microbatches:
            part.seed_draws(len(losses))
            losses.append(part(inputs=inputs, targets=targets))
        return losses


def named_parameters(part: Part) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters under the first name that the user's model has for them."""
    for name, parameter in part.model.named_parameters():
        yield part.first_names.get(name, name), parameter
