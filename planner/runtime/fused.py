"""Parts of fused projections in checkpoints, so that these do not depend on the layout."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from .gradients import num_shards
from .part import Part


def gather_parts(
    parts: Sequence[nn.Module], values: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
    """Join the parts of fused projections, so that checkpoints do not depend on the layout.

    Args:
        parts: Stages, or the plain model.
        values: One tensor per parameter, by the names of ``named_parameters``.

    Returns:
        Tensors by the user's names, and the parts of those that were joined.
    """
    whole = {name: value.detach() for name, value in values.items()}
    joined: dict[str, list[Tensor]] = {}
    for each in parts:
        fused = each.fused_modules if isinstance(each, Part) else {}
        for path, count in fused.items():
            for name in ("weight", "bias"):
                pieces = [whole.pop(f"{path}.{name}_{i}", None) for i in range(count)]
                present = [piece for piece in pieces if piece is not None]
                if present:
                    joined[f"{path}.{name}"] = present
                    whole[f"{path}.{name}"] = _join(present)
    return whole, joined


def _join(parts: Sequence[Tensor]) -> Tensor:
    first = parts[0]
    assert isinstance(first, DTensor)
    if first.shape[0] % num_shards(first):
        raise ValueError(
            f"{first.shape[0]} features of a fused projection do not divide into "
            f"{num_shards(first)} shards (tp x dp_shard): such a layout has no checkpoints"
        )
    full = torch.cat([part.full_tensor() for part in parts if isinstance(part, DTensor)])
    placements = [kept if kept.is_replicate() else Shard(0) for kept in first.placements]
    return distribute_tensor(full, first.device_mesh, placements, src_data_rank=None)


def scatter_parts(whole: Mapping[str, Tensor], joined: Mapping[str, list[Tensor]]) -> None:
    """Copy joined tensors back into their parts."""
    for name, parts in joined.items():
        value = whole[name]
        assert isinstance(value, DTensor)
        for piece, part in zip(value.full_tensor().chunk(len(parts)), parts, strict=True):
            assert isinstance(part, DTensor)
            mesh, placements = part.device_mesh, part.placements
            shard = distribute_tensor(piece, mesh, placements, src_data_rank=None)
            part._local_tensor.copy_(shard._local_tensor)
