"""What a rank trains where it holds a part of the model's blocks or of their tensors."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from .part import OffersLoss, Part
from .streams import name_again
from .trees import Tree


class SplitPart(Part):
    """The model, or a stage of it, some of whose modules may be split over ranks."""

    index = 0
    """Position among the stages."""
    is_first = True
    """Whether the model begins here."""
    is_last = True
    """Whether the loss is computed here."""

    def __init__(
        self,
        model: nn.Module,
        user: OffersLoss,
        *,
        blocks: Sequence[str],
        first_block: int = 0,
    ) -> None:
        """Take the model as it is.

        Args:
            model: The whole model, or what is left of it in a stage.
            user: Offers the loss.
            blocks: Paths of the blocks that run here.
            first_block: Position of the first of them among all blocks.
        """
        super().__init__(model, user, blocks=blocks)
        self.first_block = first_block
        self.last_block = self.blocks[-1] if self.blocks else ""
        self.sequence_modules: list[nn.Module] = []
        self.expert_modules: dict[nn.Module, list[Tree]] = {}
        """Modules of experts, each with what splits their rows over axes (``RowsEdge``)."""
        self.given_again: list[nn.Module] = []
        """Blocks that give each tensor to their modules as often as they get it."""
        self.receive: Callable[[Tensor], Tensor] = _as_it_is
        self.send: Callable[[Tensor], Tensor] = _as_it_is
        self.make_whole: Callable[[Tensor], Tensor] = _as_it_is
        self.after_blocks: Callable[..., Tree] | None = None

    def forward(self, *, inputs: Tree, targets: Tree) -> Tensor:
        """Run one microbatch and return its scalar loss, whole on each rank."""
        return self.make_whole(super().forward(inputs=inputs, targets=targets))

    def _moved(self, tensor: Tensor) -> Tensor:
        """Move a tensor; one element that is expanded to many stays one."""
        if tensor.is_meta or any(tensor.stride()) or tensor.numel() <= 1:
            return super()._moved(tensor)
        zero = torch.zeros((), dtype=tensor.dtype, device=self.device)
        return zero.expand(tensor.shape)

    def saved_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the persistent buffers of the modules that run here, by the user's names."""
        modules = self.model.named_modules()
        elsewhere = tuple(f"{path}." for path, module in modules if not self.holds(module))
        for name, buffer in super().saved_buffers():
            if not name.startswith(elsewhere):
                yield name, buffer

    def register_late_hooks(self) -> None:
        """Register what looks at outputs of modules, after the hooks that FSDP2 put on them.

        And what they are given more than once, before those.
        """
        for block in self.given_again:
            block.register_forward_pre_hook(name_again, prepend=True, with_kwargs=True)
        if self.is_last and self.after_blocks is not None:
            last = self.model.get_submodule(self.last_block)
            last.register_forward_hook(self.after_blocks)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
