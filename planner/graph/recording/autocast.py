"""``torch.autocast`` on the meta device, as it works on CUDA.

torch's own autocast kernels look at the device of each tensor and leave meta tensors alone, without
a word. While a step is recorded, kernels of the same policy stand in their place: products in the
lower precision, what loses digits in float32, the rest in the widest type that it is given. See
ATen/autocast_mode.h for the lists.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from planner.graph import torch_private
from planner.graph.loading.source import UserLine, lines_of_stack
from planner.graph.torch_private import TorchOp, TorchResult

_open_library: Callable[[str, str], TorchResult] = torch.library.Library

_Cast = Callable[[TorchOp, tuple[Any, ...], dict[str, Any]], TorchResult]
"""Runs an op with other types."""

LOWER_PRECISION_OPS = frozenset(
    {
        "_convolution",
        "_convolution.deprecated",
        "_scaled_dot_product_flash_attention",
        "_thnn_fused_gru_cell",
        "_thnn_fused_lstm_cell",
        "addbmm",
        "addmm",
        "addmv",
        "addr",
        "baddbmm",
        "bmm",
        "chain_matmul",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_tbc",
        "conv_transpose1d",
        "conv_transpose2d.input",
        "conv_transpose3d.input",
        "convolution",
        "einsum",
        "gru_cell",
        "linalg_multi_dot",
        "linalg_vecdot",
        "linear",
        "lstm_cell",
        "matmul",
        "mm",
        "mv",
        "prelu",
        "rnn_relu_cell",
        "rnn_tanh_cell",
        "scaled_dot_product_attention",
    }
)
"""Ops that run in the type of autocast."""

RECURRENT_OPS = frozenset(
    f"{kind}.{form}"
    for kind in ("gru", "lstm", "rnn_relu", "rnn_tanh")
    for form in ("data", "input")
)
"""On CUDA these are one op of cuDNN, which runs in the type of autocast too."""

OUTPUT_TYPE_OPS = frozenset(
    {
        "cumprod",
        "cumsum",
        "linalg_matrix_norm",
        "linalg_matrix_norm.str_ord",
        "linalg_vector_norm",
        "log_softmax.int",
        "prod",
        "prod.dim_int",
        "softmax.int",
        "sum",
        "sum.dim_IntList",
    }
)
"""Ops whose result is float32 where no other type is asked for."""

APPENDED_TYPE_OPS = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}
"""Ops whose result is float32, with the overload that takes a type."""

WIDEST_TYPE_OPS = frozenset(
    {
        "addcdiv",
        "addcmul",
        "atan2",
        "bilinear",
        "cross",
        "dot",
        "grid_sampler",
        "index_put",
        "scatter_add",
        "tensordot",
        "vdot",
    }
)
"""Ops that run in the widest type that they are given."""

OWN_KERNEL_OPS = frozenset(
    {"binary_cross_entropy", "cudnn_convolution", "cudnn_convolution_transpose"}
)
"""Ops that torch refuses under autocast, or that are not called on the meta device."""


class AutocastOnMeta:
    """Applies autocast for CUDA to meta tensors, from its first use in a step on."""

    def __init__(self) -> None:
        self._casts: dict[tuple[int, torch.dtype], Tensor] = {}
        self._library: TorchResult = None
        self._ignored: dict[UserLine, str] = {}
        self.place = ""
        """Line that first switched autocast on, "model.py:57"."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Uses of autocast that have no effect on a GPU, one sentence for each line."""
        return tuple(
            f"{line.place} ({line.code}) uses autocast for {device!r}, which changes nothing on a"
            " GPU: the trace leaves it out"
            for line, device in self._ignored.items()
        )

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let autocast work on meta tensors."""
        with ExitStack() as stack:
            stack.callback(self._close)
            for owner, name, call in (
                (torch.autocast, "__init__", self._entering(torch.autocast.__init__)),
                (torch, "clear_autocast_cache", self._clearing(torch.clear_autocast_cache)),
                (torch, "is_autocast_enabled", _for_cuda(torch.is_autocast_enabled)),
                (torch, "get_autocast_dtype", _for_cuda(torch.get_autocast_dtype)),
                (torch.amp, "is_autocast_available", _for_cuda(torch.amp.is_autocast_available)),
            ):
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, call)
            stack.enter_context(torch_private.autocast_reaches_meta())
            yield

    def _entering(self, make: Callable[..., None]) -> Callable[..., None]:
        """Take autocast for the meta device, which torch refuses, for that for CUDA."""

        def enter(
            autocast: torch.autocast,
            device_type: str,
            dtype: torch.dtype | None = None,
            enabled: bool = True,  # noqa: FBT001, FBT002
            cache_enabled: bool | None = None,  # noqa: FBT001
        ) -> None:
            line = next(lines_of_stack(), None) if enabled else None
            if line is not None:
                self.place = self.place or line.place
            if device_type not in ("cuda", "meta"):
                make(autocast, device_type, dtype, enabled, cache_enabled)
                if line is not None:
                    self._ignored[line] = device_type
                return
            # Without CUDA torch would switch it off again.
            make(autocast, "cuda", dtype, enabled=False, cache_enabled=cache_enabled)
            autocast._enabled = enabled
            if enabled and self._library is None:
                self._library = self._open()

        return enter

    def _clearing(self, clear: Callable[[], None]) -> Callable[[], None]:
        def clear_all() -> None:
            self._casts.clear()
            clear()

        return clear_all

    def _open(self) -> TorchResult:
        library = _open_library("aten", "IMPL")
        with warnings.catch_warnings():
            # torch says on every override that it was overridden.
            warnings.simplefilter("ignore", UserWarning)
            for name in (*torch_private.autocast_ops(), *RECURRENT_OPS):
                if name in OWN_KERNEL_OPS:
                    continue
                packet, _, overload = name.partition(".")
                op = getattr(getattr(torch.ops.aten, packet), overload or "default")
                kernel = _kernel(op, self._policy(name))
                library.impl(name, kernel, "AutocastCUDA", allow_override=True)
        return library

    def _close(self) -> None:
        self._casts.clear()
        if self._library is not None:
            self._library._destroy()
            self._library = None

    # Policies ----------------------------------------------------------------------------------

    def _policy(self, name: str) -> _Cast:
        if name in LOWER_PRECISION_OPS or name in RECURRENT_OPS:
            return self._lower
        if name in OUTPUT_TYPE_OPS:
            return _to_float_result
        if name in APPENDED_TYPE_OPS:
            return _to_float_norm
        return self._widest if name in WIDEST_TYPE_OPS else self._to_float

    def _lower(self, op: TorchOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TorchResult:
        return self._run(op, args, kwargs, torch.get_autocast_dtype("cuda"))

    def _to_float(self, op: TorchOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TorchResult:
        return self._run(op, args, kwargs, torch.float32)

    def _widest(self, op: TorchOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TorchResult:
        tensors = torch_private.tree_leaves((args, kwargs))
        has_float = any(
            isinstance(tensor, Tensor) and tensor.dtype == torch.float32 for tensor in tensors
        )
        lower = torch.get_autocast_dtype("cuda")
        return self._run(op, args, kwargs, torch.float32 if has_float else lower)

    def _run(
        self, op: TorchOp, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
    ) -> TorchResult:
        cast_args, cast_kwargs = torch_private.tree_map_only(
            Tensor, lambda tensor: self._cast(tensor, dtype), (args, kwargs)
        )
        return op(*cast_args, **cast_kwargs)

    def _cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Cast a tensor; parameters are cast once until autocast ends."""
        if not _is_eligible(tensor) or tensor.dtype == dtype:
            return tensor
        is_kept = (
            torch.is_autocast_cache_enabled()
            and dtype == torch.get_autocast_dtype("cuda")
            and tensor.dtype == torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not tensor._is_view()
        )
        if not is_kept:
            return tensor.to(dtype)
        key = id(tensor), dtype
        if key not in self._casts:
            self._casts[key] = tensor.to(dtype)
        return self._casts[key]


def _is_eligible(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64


def _kernel(op: TorchOp, policy: _Cast) -> Callable[..., TorchResult]:
    def kernel(*args: TorchResult, **kwargs: TorchResult) -> TorchResult:
        with torch_private.without_autocast():
            return policy(op, args, kwargs)

    return kernel


def _to_float_result(op: TorchOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TorchResult:
    names = [argument.name for argument in op._schema.arguments]
    given: Sequence[Any] = args[names.index("dtype") : names.index("dtype") + 1]
    is_given = kwargs.get("dtype") is not None or any(each is not None for each in given)
    if is_given or not _is_eligible(args[0]):
        return op(*args, **kwargs)
    return op(*args[: names.index("dtype")], **{**kwargs, "dtype": torch.float32})


def _to_float_norm(op: TorchOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TorchResult:
    overload = APPENDED_TYPE_OPS[f"norm.{op._overloadname}"]
    dtype = torch.float32 if _is_eligible(args[0]) else args[0].dtype
    return getattr(torch.ops.aten.norm, overload)(*args, **kwargs, dtype=dtype)


def _for_cuda(call: Callable[..., Any]) -> Callable[..., Any]:
    """Answer a question about the meta device as for CUDA."""

    def asked(*args: TorchResult) -> TorchResult:
        return call(*("cuda" if argument == "meta" else argument for argument in args))

    return asked
