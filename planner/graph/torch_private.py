"""Every private torch name that tracing needs, in one place.

``tests/graph/test_torch_private.py`` calls each of them, so that a torch that moves one fails
there and says which.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import _VF
from torch._C._autograd import _get_sequence_nr
from torch._subclasses import fake_tensor
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.autograd.graph import Node

DataDependentOutputException = fake_tensor.DataDependentOutputException
"""What fake tensors raise where a number is asked of them."""

pack_padded_sequence: Callable[..., Any] = _VF._pack_padded_sequence
"""What ``torch.nn.utils.rnn.pack_padded_sequence`` calls with (source, lengths, batch first)."""

pad_packed_sequence: Callable[..., Any] = _VF._pad_packed_sequence
"""What ``torch.nn.utils.rnn.pad_packed_sequence`` calls with (data, sizes, batch first, padding,
steps)."""

TorchOp: TypeAlias = "OpOverload[..., Any]"
"""One overload of an ATen op, or of an op of the same form."""

TorchResult: TypeAlias = Any
"""What an op takes or returns."""

_KNOWN_NAMESPACES = frozenset({"aten", "prim", "prims", "planner"})
"""Whose names of ops are known to the project."""

__all__ = [
    "TorchDispatchMode",
    "TorchOp",
    "TorchResult",
    "are_modes_disabled",
    "autocast_ops",
    "autocast_reaches_meta",
    "chance_argument",
    "current_node",
    "device_constructors",
    "flex_attention_kernel",
    "has_dynamic_output",
    "is_pointwise",
    "is_random",
    "is_transformed",
    "modes_disabled",
    "module_hooks",
    "next_sequence_number",
    "node_sequence_number",
    "pack_padded_sequence",
    "packet_name",
    "pad_packed_sequence",
    "reached_nodes",
    "schema_aliases",
    "storage_key",
    "tree_leaves",
    "tree_map_only",
    "without_autocast",
]


def device_constructors() -> frozenset[Callable[..., Any]]:
    """Return the functions of torch that make tensors on a device."""
    return frozenset(_device_constructors())


def current_node() -> "Node | None":
    """Return the autograd node that runs on this thread, None outside of backward."""
    return cast("Node | None", torch._C._current_autograd_node())


def next_sequence_number() -> int:
    """Return the number that the next autograd node made on this thread will get."""
    return _get_sequence_nr()


def node_sequence_number(node: "Node") -> int:
    """Return the number that a node got when forward made it (2**64 - 1 for accumulation)."""
    return node._sequence_nr()


def reached_nodes(loss: torch.Tensor) -> set[int]:
    """Return the numbers of the nodes that a loss's gradient flows through."""
    found = {loss.grad_fn} if loss.grad_fn is not None else set()
    left = list(found)
    while left:
        for node, _ in left.pop().next_functions:
            if node is not None and node not in found:
                found.add(node)
                left.append(node)
    return {node_sequence_number(node) for node in found}


def storage_key(tensor: torch.Tensor) -> tuple[torch.UntypedStorage, int]:
    """Return a tensor's storage and the address of its C++ object.

    The address is an identity only as long as the returned storage is kept alive.
    """
    storage = tensor.untyped_storage()
    return storage, storage._cdata


def packet_name(func: TorchOp) -> str:
    """Return the op's name without overload: "mm" for aten.mm.default.

    Ops that are neither torch's nor ours keep their namespace, "user::mm": a name alone then says
    what an op computes.
    """
    name = func._overloadpacket.__name__
    return name if func.namespace in _KNOWN_NAMESPACES else f"{func.namespace}::{name}"


def schema_aliases(func: TorchOp) -> tuple[bool, tuple[tuple[int, str, bool], ...]]:
    """Read from the op's schema what its outputs share with its inputs.

    Returns:
        Whether an output aliases an input that is not written to, and the arguments written to
        as (position, name, keyword only).
    """
    views = False
    written: list[tuple[int, str, bool]] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None:
            continue
        if argument.alias_info.is_write:
            written.append((position, argument.name, argument.kwarg_only))
        else:
            views = True
    return views and not written, tuple(written)


def has_dynamic_output(func: TorchOp) -> bool:
    """Tell whether the sizes or the value of the result depend on the data of the inputs."""
    tags = func.tags
    return torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags


def is_pointwise(func: TorchOp) -> bool:
    """Tell whether torch says of this overload that it works element by element.

    Each element of the result then depends on the operands' elements at its own place alone,
    after they are broadcast.
    """
    return torch.Tag.pointwise in func.tags


def is_random(func: TorchOp) -> bool:
    """Tell whether the op draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def chance_argument(func: TorchOp) -> tuple[int, str, Any] | None:
    """Return position, name and default of the argument by which an op draws, None for none.

    It is a probability: where it is 0, nothing depends on what is drawn.
    """
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in ("p", "dropout_p"):
            default = argument.default_value if argument.has_default_value() else None
            return position, argument.name, default
    return None


def is_transformed(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor stands for others inside of ``torch.func.vmap`` and its kind."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def are_modes_disabled() -> bool:
    """Tell whether this runs inside of ``modes_disabled``."""
    return torch._C._is_torch_function_all_disabled()


@contextmanager
def modes_disabled() -> Iterator[None]:
    """Switch all dispatch and function modes off, to run an op for real inside of a mode."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


@contextmanager
def module_hooks(
    before: Callable[[torch.nn.Module, tuple[Any, ...]], None],
    after: Callable[[torch.nn.Module, Any], None],
) -> Iterator[None]:
    """Call ``before`` and ``after`` around every module's forward, in the whole process.

    ``after`` is called even where the module raised.
    """
    pre = register_module_forward_pre_hook(before)
    post = register_module_forward_hook(
        lambda module, _, output: after(module, output), always_call=True
    )
    try:
        yield
    finally:
        pre.remove()
        post.remove()


def autocast_ops() -> list[str]:
    """Return the ATen ops, "softmax.int" or "linear", that autocast for CUDA handles."""
    return [
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
        and torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")
    ]


@contextmanager
def autocast_reaches_meta() -> Iterator[None]:
    """Let autocast for CUDA, where it is switched on, see tensors on the meta device."""
    key = torch._C.DispatchKey.AutocastCUDA
    before = torch._C._dispatch_tls_is_dispatch_key_included(key)
    torch._C._dispatch_tls_set_dispatch_key_included(key, True)  # noqa: FBT003
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_included(key, before)


@contextmanager
def flex_attention_kernel(kernel: Callable[..., Any]) -> Iterator[None]:
    """Let ``flex_attention`` take tensors on any device, and call a kernel in place of its own.

    Args:
        kernel: Gets query, key, value, score_mod, block mask (as a tuple), scale and options;
            returns output, log of the score sums and greatest scores.
    """
    module = sys.modules.get("torch.nn.attention.flex_attention")
    own = {
        "_validate_device": lambda *_: None,
        "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,
        "flex_attention_hop": kernel,
    }
    before = {name: vars(module)[name] for name in own} if module else {}
    try:
        if module:
            vars(module).update(own)
        yield
    finally:
        if module:
            vars(module).update(before)


def without_autocast() -> AbstractContextManager[object]:
    """Switch autocast for CUDA off inside of its own kernels."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    return cast(AbstractContextManager[object], torch._C._ExcludeDispatchKeyGuard(keys))
