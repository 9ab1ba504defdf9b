"""Blocks that run again in backward."""

import functools
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from .part import Part
from .trees import Function, Tree

_aten = torch.ops.aten

SAVED_OPS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.convolution.default,
        _aten._grouped_mm.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)
"""What selective recomputation keeps: outputs of matrix products, convolutions and attention."""


def _selective_policy(_: object, op: Function, *_args: Tree, **_kwargs: Tree) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_activations(part: Part) -> None:
    """Recompute blocks in backward as the part's spec says.

    Raises:
        ValueError: An unknown word in the spec.
    """
    if not part.recompute:
        return
    contexts = functools.partial(create_selective_checkpoint_contexts, _selective_policy)
    options: dict[str, dict[str, Any]] = {"full": {}, "selective": {"context_fn": contexts}}
    for (path, block), mode in zip(part.block_items(), part.recompute, strict=True):
        if mode == "none":
            continue
        if mode not in options:
            raise ValueError(f"{path}: {mode!r} is not one of none, selective, full")
        block.forward = functools.partial(
            checkpoint, block.forward, use_reentrant=False, **options[mode]
        )
