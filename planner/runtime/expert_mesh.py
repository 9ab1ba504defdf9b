"""The ranks that share experts, and those that share the state of the same ones."""

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from .mesh_order import divided_mesh
from .meshes import axis_names, local_tensor
from .part import policies
from .split_part import SplitPart


def expert_mesh(mesh: DeviceMesh, ep: int) -> DeviceMesh:
    """Return the mesh with dp_shard, cp and tp as others: dp_shard_mod_ep, and ep inside it.

    All ranks ask for it at the same time, since its groups are made here.
    """
    sizes = {name: mesh[name].size() for name in axis_names(mesh)}
    lent = sizes.pop("dp_shard") * sizes.pop("tp", 1) * sizes.pop("cp", 1)
    sizes["dp_shard_mod_ep"] = lent // ep
    sizes["ep"] = ep
    return divided_mesh(mesh, sizes)


def shard_experts(
    part: SplitPart, mesh: DeviceMesh, dtype: torch.dtype, *, reshard_after_forward: bool
) -> None:
    """Apply FSDP2 to modules of experts, each over the ranks that have the same experts.

    Args:
        part: Holds them.
        mesh: From ``expert_mesh``.
        dtype: Compute dtype.
        reshard_after_forward: As for blocks.
    """
    axes = tuple(name for name in axis_names(mesh) if name in ("dp_replicate", "dp_shard_mod_ep"))
    policy = policies(part, dtype, num_shards=mesh["dp_shard_mod_ep"].size())
    for module in part.expert_modules:
        fully_shard(module, mesh=mesh[axes], reshard_after_forward=reshard_after_forward, **policy)


def average_experts(parts: Sequence[SplitPart], batches: int) -> None:
    """Make gradients of experts the means over all ranks that the others' are.

    FSDP2 takes the mean over ranks with the same experts, and each has added up the tokens of ep.

    Args:
        parts: What this rank trains.
        batches: Microbatches whose tokens the ranks of ep have: one for all ranks of tp and cp.
    """
    for part in parts:
        for module in part.expert_modules:
            for parameter in module.parameters():
                if parameter.grad is not None:
                    local_tensor(parameter.grad).div_(batches)
