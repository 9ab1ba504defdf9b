"""Blocks that run again in backward."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from .data import python_state, set_python_state
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


def recompute_activations(part: Part, modes: Sequence[str]) -> None:
    """Recompute blocks in backward.

    Args:
        part: Has the blocks.
        modes: "none", "selective" or "full" for each of them; empty for none at all.

    Raises:
        ValueError: An unknown word.
    """
    if not modes:
        return
    contexts = functools.partial(create_selective_checkpoint_contexts, _selective_policy)
    options: dict[str, dict[str, Any]] = {"full": {}, "selective": {"context_fn": contexts}}
    for (path, block), mode in zip(part.block_items(), modes, strict=True):
        if mode == "none":
            continue
        if mode not in options:
            raise ValueError(f"{path}: {mode!r} is not one of none, selective, full")
        block.forward = functools.partial(_recomputed, block.forward, options[mode])


def _recomputed(forward: Function, options: Mapping[str, Any], *args: Tree, **kwargs: Tree) -> Tree:
    if not torch.compiler.is_compiling():  # a graph draws of torch alone
        forward = _drawing_again(forward)
    return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)


def _drawing_again(function: Function) -> Callable[..., Tree]:
    """Return a function that draws of Python and numpy what it drew when it ran first.

    ``torch.utils.checkpoint`` sees to torch's own generators alone.
    """
    state = python_state()
    has_run = False

    def run(*args: Tree, **kwargs: Tree) -> Tree:
        nonlocal has_run
        if not has_run:
            has_run = True
            return function(*args, **kwargs)
        now = python_state()
        set_python_state(state)
        try:
            return function(*args, **kwargs)
        finally:
            set_python_state(now)

    return run
