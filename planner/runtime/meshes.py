"""Axes of a mesh, and what a rank holds of tensors on it."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of a mesh's axes."""
    return mesh.mesh_dim_names or ()


def local_tensor(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def scale_all(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place, those of one dtype together.

    A kernel for each would take the host longer than all of them the device.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for dtype, alike in by_dtype.items():
        torch._foreach_mul_(alike, factor.to(dtype))


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors to as many others of their shapes, together."""
    torch._foreach_copy_(targets, sources)


def copy_share(whole: Tensor, held: Tensor) -> None:
    """Copy this rank's share of a whole tensor into what it holds."""
    if isinstance(held, DTensor):
        mesh, placements = held.device_mesh, held.placements
        whole = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    local_tensor(held).copy_(local_tensor(whole))
