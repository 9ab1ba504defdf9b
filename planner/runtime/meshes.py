"""Axes of a mesh, and what a rank holds of tensors on it."""

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of a mesh's axes."""
    return mesh.mesh_dim_names or ()


def local_tensor(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def copy_share(whole: Tensor, held: Tensor) -> None:
    """Copy this rank's share of a whole tensor into what it holds."""
    if isinstance(held, DTensor):
        mesh, placements = held.device_mesh, held.placements
        whole = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    local_tensor(held).copy_(local_tensor(whole))
