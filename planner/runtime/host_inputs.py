"""Inputs of blocks that run again in backward, in host memory until then."""

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from .trees import Tree

_Packed: TypeAlias = Tensor | tuple[Tensor, torch.device]
"""What stays where it is, or a copy on the host with the device that it is of."""


def on_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host, which goes on; pinned memory where it is a GPU's."""
    kept = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
    return kept.copy_(tensor, non_blocking=True)


def on_device(kept: Tensor, device: torch.device) -> Tensor:
    """Copy it back, behind what the device was asked to do before."""
    return kept.to(device, non_blocking=True)


def inputs_on_host(inputs: Sequence[Tree]) -> AbstractContextManager[object]:
    """Let what is saved of a block's inputs lie on the host, but for what needs no gradient.

    All blocks read the latter, tables of positions and the like, so that the device keeps them.
    """
    streams = {_memory(each) for each in inputs if isinstance(each, Tensor) and each.requires_grad}

    def pack(tensor: Tensor) -> _Packed:
        if _memory(tensor) not in streams:
            return tensor
        return on_host(tensor), tensor.device

    def unpack(packed: _Packed) -> Tensor:
        return on_device(*packed) if isinstance(packed, tuple) else packed

    return saved_tensors_hooks(pack, unpack)


def _memory(tensor: Tensor) -> Hashable:
    """Return what equals for tensors that lie in the same memory."""
    memory: Hashable = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    return memory
