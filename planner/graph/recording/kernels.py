"""GPU kernels on the meta device.

Without a GPU torch splits attention, dropout, RMSNorm and recurrent layers into the ops of a slow
fallback, whose memory and FLOPs are not those of a training run. ``fused_kernels`` routes them to
the op that a CUDA run dispatches, or to an op of the same arguments and results where torch has
no meta kernel for it.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from planner.graph.recording.grouped_heads import repeat_heads
from planner.graph.torch_private import DataDependentOutputException

_Context: TypeAlias = Any
"""Context of an autograd function."""

_Option: TypeAlias = Any
"""Argument or result of an op, as its schema says."""

FLASH_HEAD_DIM_LIMIT = 256
"""Largest head dim of the flash attention kernel."""

_SIDE_BY_SIDE = 2
"""Dims of texts that are padded to one length; those that follow one another have one."""

_NONE, _MEAN = 0, 1
"""Numbers of torch's reductions of a loss."""

_allows_flash: Callable[[], bool] = torch.backends.cuda.flash_sdp_enabled
_allows_cudnn: Callable[[], bool] = torch.backends.cuda.cudnn_sdp_enabled
_allows_efficient: Callable[[], bool] = torch.backends.cuda.mem_efficient_sdp_enabled

_open_library: Callable[[str, str], _Option] = torch.library.Library

_ops = _open_library("planner", "DEF")
_ops.define(
    "_fused_rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, float? eps)"
    " -> (Tensor, Tensor)"
)
_ops.define(
    "_fused_rms_norm_backward(Tensor grad_out, Tensor input, SymInt[] normalized_shape,"
    " Tensor rstd, Tensor? weight) -> (Tensor, Tensor)"
)
_ops.define(
    "_fused_rnn(Tensor input, Tensor hx, Tensor? cx, Tensor[] params, int gates, int layers,"
    " bool bidirectional, bool batch_first) -> (Tensor, Tensor, Tensor, Tensor)"
)
_ops.define(
    "_fused_rnn_backward(Tensor grad_out, Tensor? grad_hy, Tensor? grad_cy, Tensor input,"
    " Tensor output, Tensor reserve, Tensor hx, Tensor? cx, Tensor[] params) -> Tensor[]"
)
_ops.define("_fused_ctc_loss(Tensor log_probs, Tensor targets, int longest) -> (Tensor, Tensor)")
_ops.define(
    "_fused_ctc_loss_backward(Tensor grad_out, Tensor log_probs, Tensor targets, Tensor loss,"
    " Tensor log_alpha) -> Tensor"
)


def _rms_norm_meta(
    source: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, _: float | None
) -> tuple[Tensor, Tensor]:
    dtype = source.dtype if weight is None else torch.promote_types(source.dtype, weight.dtype)
    lead = source.shape[: source.dim() - len(normalized_shape)]
    # The statistics are at least float32 in the CUDA kernel.
    stats = torch.promote_types(source.dtype, torch.float32)
    rstd = source.new_empty([*lead, *[1] * len(normalized_shape)], dtype=stats)
    return source.new_empty(source.shape, dtype=dtype), rstd


def _rms_norm_backward_meta(
    _: Tensor, source: Tensor, __: Sequence[int], ___: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    grad_weight = source.new_empty(0) if weight is None else torch.empty_like(weight)
    return source.new_empty(source.shape), grad_weight


def _rnn_meta(
    source: Tensor, hx: Tensor, cx: Tensor | None, params: Sequence[Tensor], *options: _Option
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gates, layers, bidirectional, _ = options
    directions = 2 if bidirectional else 1
    output = source.new_empty([*source.shape[:2], directions * hx.shape[-1]])
    # The least that backward needs of each layer and step: the gates and the cell state.
    steps = source.shape[0] * source.shape[1]
    hidden = (hx if cx is None else cx).shape[-1]
    reserve = source.new_empty(layers * directions * steps * hidden * (gates + 1))
    return output, torch.empty_like(hx), _like(cx, source), reserve


def _like(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Make a tensor like the one that is there, or an empty one."""
    return other.new_empty(0) if tensor is None else torch.empty_like(tensor)


def _rnn_backward_meta(
    _: Tensor, __: Tensor | None, ___: Tensor | None, *saved: _Option
) -> list[Tensor]:
    source, _output, _reserve, hx, cx, params = saved
    return [_like(each, source) for each in (source, hx, cx, *params)]


def _ctc_loss_meta(log_probs: Tensor, _: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    steps, size, _classes = log_probs.shape
    # What backward needs of each step: every label, and a blank before and after each.
    log_alpha = log_probs.new_empty(size, steps, 2 * longest + 1)
    return log_probs.new_empty(size), log_alpha


def _ctc_loss_backward_meta(_: Tensor, log_probs: Tensor, *__: Tensor) -> Tensor:
    return torch.empty_like(log_probs)


def _grouped_mm_meta(
    left: Tensor, right: Tensor, offs: Tensor | None = None, *options: _Option
) -> Tensor:
    """Multiply matrices of any dtype in groups; torch's own meta kernel takes bfloat16 alone."""
    dtype = options[1] if len(options) > 1 else None
    groups: list[int] = []
    if left.dim() == right.dim():
        groups = [left.shape[0] if offs is None else offs.shape[0]]
    return left.new_empty([*groups, left.shape[-2], right.shape[-1]], dtype=dtype or left.dtype)


_ops.impl("_fused_rms_norm", _rms_norm_meta, "Meta")
_ops.impl("_fused_rms_norm_backward", _rms_norm_backward_meta, "Meta")
_ops.impl("_fused_rnn", _rnn_meta, "Meta")
_ops.impl("_fused_rnn_backward", _rnn_backward_meta, "Meta")
_ops.impl("_fused_ctc_loss", _ctc_loss_meta, "Meta")
_ops.impl("_fused_ctc_loss_backward", _ctc_loss_backward_meta, "Meta")


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        source: Tensor,
        shape: Sequence[int],
        weight: Tensor | None,
        eps: float | None,
    ) -> Tensor:
        output, rstd = torch.ops.planner._fused_rms_norm(source, shape, weight, eps)
        ctx.save_for_backward(source, rstd, weight)
        ctx.shape = shape
        result: Tensor = output
        return result

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        source, rstd, weight = ctx.saved_tensors
        grads = torch.ops.planner._fused_rms_norm_backward(grad, source, ctx.shape, rstd, weight)
        return grads[0], None, None if weight is None else grads[1], None


class _Rnn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        source: Tensor,
        hx: Tensor,
        cx: Tensor | None,
        options: tuple[Any, ...],
        *params: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        output, hy, cy, reserve = torch.ops.planner._fused_rnn(
            source, hx, cx, list(params), *options
        )
        ctx.save_for_backward(source, output, reserve, hx, cx, *params)
        ctx.set_materialize_grads(False)
        return output, hy, cy

    @staticmethod
    def backward(
        ctx: _Context, grad: Tensor | None, grad_hy: Tensor | None, grad_cy: Tensor | None
    ) -> tuple[Any, ...]:
        source, output, reserve, hx, cx, *params = ctx.saved_tensors
        if grad is None:
            grad = torch.empty_like(output)
        grads = torch.ops.planner._fused_rnn_backward(
            grad, grad_hy, grad_cy, source, output, reserve, hx, cx, params
        )
        inputs = (*grads[:3], None, *grads[3:])
        wanted = zip(inputs, ctx.needs_input_grad, strict=True)
        return tuple(each if needed else None for each, needed in wanted)


class _CtcLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, log_probs: Tensor, targets: Tensor, longest: int) -> Tensor:
        loss, log_alpha = torch.ops.planner._fused_ctc_loss(log_probs, targets, longest)
        ctx.save_for_backward(log_probs, targets, loss, log_alpha)
        result: Tensor = loss
        return result

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, None]:
        return torch.ops.planner._fused_ctc_loss_backward(grad, *ctx.saved_tensors), None, None


_apply_rms_norm: Callable[..., _Option] = _RmsNorm.apply
_apply_rnn: Callable[..., _Option] = _Rnn.apply
_apply_ctc_loss: Callable[..., _Option] = _CtcLoss.apply


def _rms_norm(
    source: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> _Option:
    return _apply_rms_norm(source, shape, weight, eps)


def _lstm(
    source: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], *options: _Option
) -> _Option:
    _, layers, _, _, bidirectional, batch_first = options
    return _apply_rnn(source, hx[0], hx[1], (4, layers, bidirectional, batch_first), *params)


def _gru(source: Tensor, hx: Tensor, params: Sequence[Tensor], *options: _Option) -> _Option:
    _, layers, _, _, bidirectional, batch_first = options
    output, hy, _ = _apply_rnn(source, hx, None, (3, layers, bidirectional, batch_first), *params)
    return output, hy


def _packed_lstm(
    data: Tensor, _: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], *options: _Option
) -> _Option:
    output, hy, cy = _lstm(data.unsqueeze(0), hx, params, *options, True)  # noqa: FBT003
    return output.squeeze(0), hy, cy


def _packed_gru(
    data: Tensor, _: Tensor, hx: Tensor, params: Sequence[Tensor], *options: _Option
) -> _Option:
    output, hy = _gru(data.unsqueeze(0), hx, params, *options, True)  # noqa: FBT003
    return output.squeeze(0), hy


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, _: _Option, lengths: _Option, *options: _Option
) -> Tensor:
    """Dispatch the loss of alignments; its memory depends on the longest text.

    Texts side by side may all be as long as they are padded to, whatever lengths the data have.
    """
    reduction = options[1] if len(options) > 1 else 1
    if not isinstance(lengths, Tensor):
        lengths = torch.tensor(lengths)
    longest = targets.shape[1] if targets.dim() == _SIDE_BY_SIDE else _longest(targets, lengths)
    loss: Tensor = _apply_ctc_loss(log_probs, targets, longest)
    if reduction == _MEAN:
        loss = (loss / lengths.to(loss).clamp_min(1)).mean()
    return loss.sum() if reduction not in (_NONE, _MEAN) else loss


def _longest(targets: Tensor, lengths: Tensor) -> int:
    """Length of the longest of texts that follow one another, their mean where none is known."""
    try:
        return int(lengths.max())
    except DataDependentOutputException:  # a fake tensor
        return -(-targets.numel() // max(1, lengths.numel()))


def _dropout(source: Tensor, *options: _Option) -> Tensor:
    p, train = options
    if not train or p == 0:
        return source
    result: Tensor = torch.ops.aten.native_dropout(source, p, train)[0]
    return result


def _additive_mask(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        zeros = torch.zeros_like(mask, dtype=query.dtype)
        mask = zeros.masked_fill(mask.logical_not(), float("-inf"))
    return mask.expand(*query.shape[:-1], key.shape[-2])


def _takes_flash(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> bool:
    """Tell whether the flash kernel takes an attention without a mask tensor.

    It aligns its causal mask at the bottom right, torch at the top left: lengths must be equal.
    """
    if not (_allows_flash() or _allows_cudnn()):
        return False
    if is_causal and query.shape[-2] != key.shape[-2]:
        return False
    return query.shape[-1] == value.shape[-1] <= FLASH_HEAD_DIM_LIMIT


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *options: _Option,
    **keywords: _Option,
) -> Tensor:
    """Dispatch scaled dot product attention as CUDA does.

    Where it can to the flash kernel (grouped keys and values stay grouped), else to the
    memory-efficient one. Both keep query, key, value, output and the log of the score sums. In
    float32 and float64 a CPU run has a fused kernel with the same saved tensors.
    """
    dropout_p = options[0] if options else 0.0
    is_causal = options[1] if len(options) > 1 else False
    scale = keywords.get("scale")
    if query.dim() != 4:
        flat = [tensor.reshape(-1, *tensor.shape[-3:]) for tensor in (query, key, value)]
        if attn_mask is not None:
            attn_mask = _additive_mask(attn_mask, query, key).reshape(
                -1, *query.shape[-3:-1], key.shape[-2]
            )
        output = _attention(*flat, attn_mask, dropout_p, is_causal, scale=scale)
        return output.reshape(*query.shape[:-1], value.shape[-1])
    if attn_mask is None and _takes_flash(query, key, value, is_causal=is_causal):
        flash: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
        return flash
    if not _allows_efficient():
        enable_gqa = key.shape[-3] != query.shape[-3]
        plain: Tensor = torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
        return plain
    if key.shape[-3] != query.shape[-3]:
        key = repeat_heads(key, query.shape[-3])
        value = repeat_heads(value, query.shape[-3])
    if attn_mask is not None:
        attn_mask = _additive_mask(attn_mask, query, key)
    needs_grad = query.requires_grad or key.requires_grad or value.requires_grad
    efficient: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, needs_grad, dropout_p, is_causal, scale=scale
    )[0]
    return efficient


_OVERRIDES: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": _attention,
    "dropout": _dropout,
    "rms_norm": _rms_norm,
    "lstm.input": _lstm,
    "gru.input": _gru,
    "lstm.data": _packed_lstm,
    "gru.data": _packed_gru,
    "ctc_loss.IntList": _ctc_loss,
    "ctc_loss.Tensor": _ctc_loss,
}
"""By composite op, which torch would split."""


@contextmanager
def fused_kernels(key: str = "AutogradMeta") -> Iterator[None]:
    """Give meta tensors the fused kernels of CUDA, in the whole process.

    Args:
        key: torch's dispatch key of the tensors: "AutogradCPU" for fake ones on the CPU.
    """
    library = _open_library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            # torch says on every override that it was overridden.
            warnings.simplefilter("ignore", UserWarning)
            for name, kernel in _OVERRIDES.items():
                # The Meta key is refused for composite ops; autograd on meta comes before it.
                library.impl(name, kernel, key, allow_override=True)
            library.impl("_grouped_mm", _grouped_mm_meta, "Meta", allow_override=True)
        yield
    finally:
        library._destroy()
