"""Parameters sharded over the data-parallel ranks by FSDP2."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_map_only

from .model import master_dtype
from .part import Part
from .trees import Args, Tree, tensors_of, without_view


def shard_parameters(
    part: Part, mesh: DeviceMesh, dtype: torch.dtype, *, reshard_after_forward: bool
) -> None:
    """Apply FSDP2 to each block and then to the rest of the part, also where dp is 1.

    So parameters are DTensors in every layout. The rest (prologue, epilogue) stays gathered
    between forward and backward: it would be gathered again at once. The mesh is that of the ranks
    that share the state, with those that replicate it before them.
    """
    policy = mixed_precision(dtype)
    for _, block in part.block_items():
        if any(True for _ in block.parameters()):
            block.register_forward_hook(_return_no_views)
            fully_shard(
                block, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy
            )
    fully_shard(part, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    part.stays_sharded = reshard_after_forward
    part.register_late_hooks()


def mixed_precision(dtype: torch.dtype) -> MixedPrecisionPolicy:
    """Compute in a dtype, with gradients reduced in that of the masters."""
    mixed = dtype is not master_dtype(dtype)
    return MixedPrecisionPolicy(
        param_dtype=dtype if mixed else None,
        reduce_dtype=master_dtype(dtype) if mixed else None,
        cast_forward_inputs=False,  # rotary tables and the like keep their precision
    )


def _return_no_views(_: nn.Module, __: Args, output: Tree) -> Tree:
    if any(tensor._is_view() for tensor in tensors_of(output)):
        output = tree_map_only(Tensor, without_view, output)
    return output
