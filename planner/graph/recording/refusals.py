"""Steps that are refused while they are recorded: training would stop there, or never end."""

from collections.abc import Sequence

import torch
from torch import Tensor

from planner.errors import ModelError
from planner.graph.loading.source import lines_of_stack

MOST_OPS = 1_000_000
"""Ops of one step; a model with more loops over single elements, or does not end."""

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


def too_many_ops(limit: int) -> ModelError:
    """Say that a step has too many ops, and where it is."""
    line = next(lines_of_stack(), None)
    where = f"; it is at {line}" if line else ""
    return ModelError(
        f"One training step has more than {limit:,} operators: the model loops over single"
        f" elements in Python, or its loop does not end without data{where}",
        hint="Trace it with a smaller batch or a shorter sequence, or write the loop as one"
        " operator.",
    )


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


class SavedVersions:
    """Remembers how often the memory of each saved tensor had been written to.

    torch checks that in training, but not where hooks see what autograd keeps.
    """

    def __init__(self) -> None:
        self._versions: dict[int, int] = {}

    def note(self, tensor: Tensor) -> None:
        """Note a tensor that autograd keeps."""
        self._versions[id(tensor)] = tensor._version

    def check(self, tensor: Tensor) -> None:
        """Refuse a saved tensor that has been changed, as torch does in training.

        Raises:
            ModelError: It has been.
        """
        if tensor._version == self._versions.get(id(tensor), tensor._version):
            return
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise ModelError(
            "The model changes a tensor in place that backward needs as it was, of shape"
            f" {tuple(tensor.shape)} and type {dtype}: training would stop there.",
            hint="Make a new tensor (x = x + y, not x += y) after an operator that keeps its input"
            " or its result; torch.autograd.set_detect_anomaly(True) names the line in a real run.",
        )
