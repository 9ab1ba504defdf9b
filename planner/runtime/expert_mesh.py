"""The ranks that share experts, and those that share the state of the same ones."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from .processes import axis_names, local_tensor
from .sharding import mixed_precision
from .split_part import SplitPart


def expert_mesh(mesh: DeviceMesh, ep: int) -> DeviceMesh:
    """Return the mesh with dp_shard in two: dp_shard_mod_ep, and ep inside it.

    All ranks ask for it at the same time, since its groups are made here.
    """
    sizes = {name: mesh[name].size() for name in axis_names(mesh)}
    sizes["dp_shard_mod_ep"] = sizes.pop("dp_shard") // ep
    sizes["ep"] = ep
    return init_device_mesh(mesh.device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def shard_experts(
    part: SplitPart, mesh: DeviceMesh, dtype: torch.dtype, *, reshard_after_forward: bool
) -> None:
    """Apply FSDP2 to modules of experts, each over the ranks that have the same experts.

    Their gradients are sums over the tokens of all ranks, whose mean the others' are.

    Args:
        part: Holds them.
        mesh: From ``expert_mesh``.
        dtype: Compute dtype.
        reshard_after_forward: As for blocks.
    """
    axes = tuple(name for name in axis_names(mesh) if name in ("dp_replicate", "dp_shard_mod_ep"))
    shards, ranks = mesh[axes], mesh["ep"].size() * mesh[axes].size()
    count = mesh["dp_shard_mod_ep"].size()

    def place(parameter: nn.Parameter) -> Shard:
        """Split the first dim that the ranks divide: a rank may have fewer experts than that."""
        sizes = local_tensor(parameter).shape
        return Shard(next((dim for dim, size in enumerate(sizes) if size % count == 0), 0))

    for module in part.expert_modules:
        sharded = fully_shard(
            module,
            mesh=shards,
            reshard_after_forward=reshard_after_forward,
            mp_policy=mixed_precision(dtype),
            shard_placement_fn=place,
        )
        sharded.set_gradient_divide_factor(ranks)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo cannot divide on the way
