"""Blocks that torch.compile makes fewer kernels of."""

import torch

from .part import Part

_VARIANTS = 2
"""Of a block, at one size: training, and evaluation without gradients."""


def compile_blocks(part: Part) -> None:
    """Compile the forward of each block, with what of it backward computes again.

    Gathering parameters stays outside. Python between kernels that cannot be compiled is an error
    and not a block that runs as written: its time was planned without it.
    """
    allow_variants(len(part.blocks))
    for _, block in part.block_items():
        block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)


def allow_variants(blocks: int) -> None:
    """Let blocks of one class, which share a cache, be compiled once each; more is an error."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _VARIANTS * blocks)
    config.fail_on_recompile_limit_hit = True
