"""The ranks that share the state where a sample is split over ranks."""

from torch.distributed.device_mesh import DeviceMesh

from .mesh_order import divided_mesh
from .meshes import axis_names


def merged_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh with the ranks of dp_shard and cp as one axis, over which states are shared.

    All ranks ask for it at the same time, since its groups are made here.
    """
    sizes = {name: mesh[name].size() for name in axis_names(mesh) if name != "tp"}
    sizes["dp_shard_cp"] = sizes.pop("dp_shard") * sizes.pop("cp")
    if "tp" in axis_names(mesh):
        sizes["tp"] = mesh["tp"].size()
    return divided_mesh(mesh, sizes)


def state_mesh(merged: DeviceMesh) -> DeviceMesh:
    """Return the mesh of FSDP2: the merged axis, after dp_replicate."""
    return merged[tuple(name for name in axis_names(merged) if name not in ("pp", "tp"))]
