"""Parameters that hold several projections side by side, each of which is split over ranks."""

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from .layout import Layout
from .meshes import copy_share
from .stored_order import StoredOrder


@dataclass(frozen=True, slots=True)
class RankOrder(StoredOrder):
    """The order by rank of what a fused parameter holds: equal parts of it are those of ranks.

    Checkpoints have the user's order, and do not depend on the layout.
    """

    layout: Layout
    """Dim that is split, and the number of projections along it."""
    num_ranks: int
    """Ranks of the axis."""

    def by_rank(self, tensor: Tensor) -> Tensor:
        """Return a tensor in the user's order in that of ranks."""
        return self._swapped(tensor, self.layout.outer, self.num_ranks)

    def in_user_order(self, value: Tensor) -> Tensor:
        """Return a sharded tensor that holds the whole in the user's order, for a checkpoint."""
        assert isinstance(value, DTensor)
        full = self._swapped(value.full_tensor(), self.num_ranks, self.layout.outer)
        placements = [
            Shard(kept.dim) if isinstance(kept, Shard) or hasattr(kept, "dim") else kept
            for kept in value.placements
        ]
        for axis, kept in enumerate(placements):
            count = value.device_mesh.size(axis)
            if isinstance(kept, Shard) and full.shape[kept.dim] % count:
                raise ValueError(
                    f"{full.shape[kept.dim]} features of a fused projection do not divide into "
                    f"{count} shards: such a layout has no checkpoints"
                )
        return distribute_tensor(full, value.device_mesh, placements, src_data_rank=None)

    def restore(self, saved: Tensor, value: Tensor) -> None:
        """Copy what ``in_user_order`` returned, and a checkpoint has filled, back."""
        assert isinstance(saved, DTensor)
        copy_share(self.by_rank(saved.full_tensor()), value)

    def _swapped(self, tensor: Tensor, first: int, second: int) -> Tensor:
        dim = self.layout.dim
        size = tensor.shape[dim] // first // second
        pieces = tensor.reshape(*tensor.shape[:dim], first, second, size, *tensor.shape[dim + 1 :])
        return pieces.transpose(dim, dim + 1).flatten(dim, dim + 2)
