"""Parameters sharded over the data-parallel ranks by FSDP2."""

from functools import cache

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_map_only

from .model import master_dtype
from .part import Part
from .processes import axis_names
from .scalars import hold_scalars_as_vectors
from .trees import Args, Tree, tensors_of, without_view


def shard_parameters(
    part: Part, mesh: DeviceMesh, dtype: torch.dtype, *, reshard_after_forward: bool
) -> None:
    """Apply FSDP2 to each block and then to the rest of the part, also where dp is 1.

    So parameters are DTensors in every layout. The rest (prologue, epilogue) stays gathered
    between forward and backward: it would be gathered again at once.
    """
    hold_scalars_as_vectors(part)
    dp_mesh = state_mesh(mesh)
    mixed = dtype is not master_dtype(dtype)
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if mixed else None,
        reduce_dtype=master_dtype(dtype) if mixed else None,
        cast_forward_inputs=False,  # rotary tables and the like keep their precision
    )
    for _, block in part.block_items():
        if any(True for _ in block.parameters()):
            block.register_forward_hook(_return_no_views)
            fully_shard(
                block,
                mesh=dp_mesh,
                reshard_after_forward=reshard_after_forward,
                mp_policy=policy,
            )
    fully_shard(part, mesh=dp_mesh, reshard_after_forward=False, mp_policy=policy)
    part.stays_sharded = reshard_after_forward
    part.register_late_hooks()


@cache
def state_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the ranks that replicate and that share the state, those of cp among the latter.

    All ranks ask for it at the same time, since the groups are made then.
    """
    names, shares = axis_names(mesh), "dp_shard"
    if "cp" in names:
        shares = "dp_shard_cp"
        merged = {name: mesh[name].size() for name in names if name not in ("dp_shard", "cp")}
        merged[shares] = mesh["dp_shard"].size() * mesh["cp"].size()
        mesh = init_device_mesh(
            mesh.device_type, tuple(merged.values()), mesh_dim_names=tuple(merged)
        )
    return mesh["dp_replicate", shares] if "dp_replicate" in names else mesh[shares]


def _return_no_views(_: nn.Module, __: Args, output: Tree) -> Tree:
    if any(tensor._is_view() for tensor in tensors_of(output)):
        output = tree_map_only(Tensor, without_view, output)
    return output
