"""Parameters that ranks hold in another order, or of another shape, than checkpoints."""

from typing import Protocol

from torch import Tensor


class StoredOrder(Protocol):
    """How a parameter is held that checkpoints have in another order."""

    def by_rank(self, tensor: Tensor) -> Tensor:
        """Return a whole tensor of the user's order in the one that it is held in."""

    def in_user_order(self, value: Tensor) -> Tensor:
        """Return what a checkpoint has of it."""

    def restore(self, saved: Tensor, value: Tensor) -> None:
        """Copy what ``in_user_order`` returned back."""
