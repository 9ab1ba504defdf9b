"""Blocks that run again in backward."""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from .data import python_state, set_python_state
from .part import Part
from .trees import Function, Tree

_aten, _profiler = torch.ops.aten, torch.ops.profiler

# FSDP2 names what it does for experts inside a block, and has more to do when the block runs again.
SAC_IGNORED_OPS.update(
    (_profiler._record_function_enter_new.default, _profiler._record_function_exit._RecordFunction)
)

SAVED_OPS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.convolution.default,
        _aten._grouped_mm.default,
        _aten._scaled_mm_v2.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)
"""What selective recomputation keeps: outputs of matrix products, convolutions and attention."""


Keep: TypeAlias = Callable[[Sequence[Tree]], AbstractContextManager[object]]
"""Says how inputs are kept that are saved inside it."""


def _selective_policy(_: object, op: Function, *_args: Tree, **_kwargs: Tree) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_activations(
    part: Part,
    modes: Sequence[str],
    changed_buffers: Sequence[str] = (),
    *,
    keep: Keep | None = None,
) -> None:
    """Recompute blocks in backward.

    Args:
        part: Has the blocks.
        modes: "none", "selective" or "full" for each of them; empty for none at all.
        changed_buffers: Names of buffers that a forward changes.
        keep: Keeps the inputs of those in mode "full".

    Raises:
        ValueError: An unknown word.
    """
    if not modes:
        return
    for (path, block), mode in zip(part.block_items(), modes, strict=True):
        options = checkpoint_options(mode)
        if mode == "none":
            continue
        names = [n.removeprefix(f"{path}.") for n in changed_buffers if n.startswith(f"{path}.")]
        again = functools.partial(as_at_first, block, names)
        own = keep if mode == "full" else None
        block.forward = functools.partial(_recomputed, block.forward, options, again, own)


def checkpoint_options(mode: str) -> dict[str, Any]:
    """Say how a checkpoint keeps what selective recomputation keeps, full or none.

    Raises:
        ValueError: An unknown word.
    """
    if mode not in ("none", "selective", "full"):
        raise ValueError(f"{mode!r} is not one of none, selective, full")
    contexts = functools.partial(create_selective_checkpoint_contexts, _selective_policy)
    return {"context_fn": contexts} if mode == "selective" else {}


_Places = Sequence[tuple[nn.Module, str]]
"""Buffers: the module of each, and its name there."""


def _places(block: nn.Module, names: Sequence[str]) -> _Places:
    split = [name.rpartition(".") for name in names]
    return [(block.get_submodule(path), name) for path, _, name in split]


def _recomputed(
    forward: Function,
    options: Mapping[str, Any],
    again: Callable[[Function], Function],
    keep: Keep | None,
    *args: Tree,
    **kwargs: Tree,
) -> Tree:
    if not torch.compiler.is_compiling():  # a graph draws of torch alone
        forward = again(forward)
    if keep is None:
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)
    inputs, form = tree_flatten((args, kwargs))  # what is given by name is no input of a checkpoint
    flat = functools.partial(_of_flat, forward, form)
    with keep(inputs):
        return checkpoint(flat, *inputs, use_reentrant=False, **options)


def _of_flat(forward: Function, form: TreeSpec, *inputs: Tree) -> Tree:
    args, kwargs = tree_unflatten(inputs, form)
    return forward(*args, **kwargs)


def as_at_first(
    block: nn.Module, changed: Sequence[str], function: Function
) -> Callable[..., Tree]:
    """Return a function that finds what it found when it ran first, and leaves no more behind.

    It draws of Python and numpy what it drew then (``torch.utils.checkpoint`` sees to torch's own
    generators alone), and changes buffers once: when it runs again, copies are in their place. What
    hooks of the block show for its parameters is shown again: they run around it, once.

    Args:
        block: What the function runs.
        changed: Names of buffers of the block that it changes.
        function: What may run twice.
    """
    buffers = _places(block, changed)
    state = python_state()
    found = [module.get_buffer(name).detach().clone() for module, name in buffers]
    shown = [
        (
            each.__dict__,
            {name: each.__dict__[name] for name in each._parameters.keys() & each.__dict__},
        )
        for each in block.modules()
    ]
    has_run = False

    def run(*args: Tree, **kwargs: Tree) -> Tree:
        nonlocal has_run
        if not has_run:
            has_run = True
            return function(*args, **kwargs)
        now = python_state(), [module.get_buffer(name) for module, name in buffers]
        set_python_state(state)
        _put(buffers, found)
        for attributes, parameters in shown:
            attributes.update(parameters)
        try:
            return function(*args, **kwargs)
        finally:
            set_python_state(now[0])
            _put(buffers, now[1])
            for attributes, parameters in shown:
                for name in parameters:
                    del attributes[name]

    return run


def _put(buffers: _Places, tensors: Sequence[Tensor]) -> None:
    for (module, name), tensor in zip(buffers, tensors, strict=True):
        module._buffers[name] = tensor
