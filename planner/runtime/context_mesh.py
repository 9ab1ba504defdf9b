"""The ranks that share the state where a sample is split over ranks."""

from torch.distributed.device_mesh import DeviceMesh

from .mesh_order import divided_mesh
from .meshes import axis_names


def state_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of FSDP2: the ranks of dp_shard and cp as one axis, after dp_replicate.

    All ranks ask for it at the same time, since its groups are made here.
    """
    sizes = {name: mesh[name].size() for name in axis_names(mesh)}
    sizes["dp_shard_cp"] = sizes.pop("dp_shard") * sizes.pop("cp")
    merged = divided_mesh(mesh, sizes)
    return merged[tuple(name for name in sizes if name != "pp")]
