"""Element types that an op must share, which its meta kernel does not check."""

from collections.abc import Sequence

import torch
from torch import Tensor

from planner.errors import ModelError
from planner.graph.loading.source import lines_of_stack

_NORMS = frozenset({"native_layer_norm", "native_group_norm"})

OPS_OF_ONE_DTYPE = _NORMS | {
    "_fused_rnn",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "addbmm",
    "addmm",
    "addmv",
    "baddbmm",
    "bmm",
    "convolution",
    "dot",
    "mm",
    "mv",
}
"""Ops whose kernels refuse tensors of different element types."""


def check_operands(name: str, tensors: Sequence[Tensor]) -> None:
    """Refuse what the op's kernel on a real device refuses.

    Args:
        name: One of ``OPS_OF_ONE_DTYPE``.
        tensors: The tensors among its arguments, the input first.

    Raises:
        ModelError: Their element types differ.
    """
    dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
    if len(dtypes) <= 1:
        return
    reduced = tensors[0].dtype in (torch.bfloat16, torch.float16)
    if name in _NORMS and reduced and set(dtypes) == {tensors[0].dtype, torch.float32}:
        return
    words = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    line = next(lines_of_stack(), None)
    where = f" at {line}" if line else ""
    raise ModelError(
        f"The model gives {name.strip('_')} tensors of {words}{where}\nIts kernel takes one type"
        " only, so that training would stop there.",
        hint="Parameters and floating-point inputs are cast to the compute dtype, buffers and"
        " integers are not: cast one of them, for example with x.to(weight.dtype)"
        + (", or try --dtype float32." if torch.float32 in dtypes else "."),
    )
