"""Sums of gradients over tp, and the norm over the whole model."""

from collections.abc import Container, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .meshes import axis_names, local_tensor, scale_all
from .part import Part


def clip_gradients(
    parts: Sequence[Part], max_norm: float, mesh: DeviceMesh, copies: Container[int] = ()
) -> Tensor:
    """Scale all gradients so that their norm over the whole model is at most ``max_norm``.

    Parameters live on different meshes (tp or not), so each local shard is counted as often as
    there are ranks that hold it, and the sum over all ranks is corrected by that.

    Args:
        parts: What this rank trains.
        max_norm: Most that the norm may be.
        mesh: The whole mesh.
        copies: Ids of parameters that are counted on an earlier stage.

    Returns:
        The norm before scaling, the same on every rank.
    """
    pp_size = mesh["pp"].size() if "pp" in axis_names(mesh) else 1
    device = parts[0].state_device
    grads_by_holders: dict[int, list[Tensor]] = {}
    all_grads: list[Tensor] = []
    for part in parts:
        for parameter in part.parameters():
            if parameter.grad is None:
                continue
            all_grads.append(local_tensor(parameter.grad))
            if id(parameter) not in copies:
                holders = mesh.size() // pp_size // num_shards(parameter)
                grads_by_holders.setdefault(holders, []).append(all_grads[-1])
    total = torch.zeros((), dtype=torch.float64, device=device)
    for holders, grads in grads_by_holders.items():
        total += nn.utils.get_total_norm(grads).double() ** 2 / holders
    dist.all_reduce(total)
    norm = total.sqrt()
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    scale_all(all_grads, scale)
    return norm


def num_shards(parameter: Tensor) -> int:
    """Return in how many different shards a parameter is held."""
    count = 1
    if isinstance(parameter, DTensor):
        for axis, kept in enumerate(parameter.placements):
            count *= 1 if kept.is_replicate() else parameter.device_mesh.size(axis)
    return count
