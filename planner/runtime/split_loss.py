"""A vocabulary that is split over ranks: looking tokens up, and the loss over split logits."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from .layout import PARTIAL, REPLICATE, Layout
from .split_ops import SPECIAL
from .split_tensor import SplitTensor, layout_inside, unwrapped, wrapped
from .trees import Args, Function, Kwargs, Tree

_NONE, _MEAN, _SUM = range(3)
"""How torch numbers the reductions of losses."""


def _embedding(ids: Tensor, weight: Tensor, *args: Tree, **kwargs: Tree) -> Tensor:
    """Look up the tokens whose rows this rank has; zeros for the others make a sum over ranks."""
    if isinstance(weight, SplitTensor) and layout_inside(weight) != REPLICATE:
        found = _embedding(unwrapped(ids), unwrapped(weight), *args, **kwargs)
        return (
            wrapped(found, ids.layout_over_ranks, ids.ranks)
            if isinstance(ids, SplitTensor)
            else found
        )
    if not isinstance(weight, SplitTensor) or weight.layout_over_ranks != Layout("shard", 0):
        return functional.embedding(ids, weight, *args, **kwargs)
    names = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    options = {**dict(zip(names, args, strict=False)), **kwargs}
    if options.get("max_norm") is not None or options.get("scale_grad_by_freq"):
        raise RuntimeError("an embedding that rescales its rows cannot be split by rows")
    ranks, padding = weight.ranks, options.get("padding_idx")
    rows = weight.shape[0] // ranks.size
    own = ids - ranks.rank * rows
    is_own = (own >= 0) & (own < rows)
    if padding is not None:  # its row gets no gradient
        held = padding % weight.shape[0] - ranks.rank * rows
        padding = held if 0 <= held < rows else None
    local = functional.embedding(own.where(is_own, 0), unwrapped(weight), padding)
    return wrapped(local * is_own.unsqueeze(-1), PARTIAL, ranks)


def _over_classes(tensor: object, dim: int) -> bool:
    """Say whether a tensor is split along the dim of the classes."""
    if not isinstance(tensor, SplitTensor):
        return False
    layout = tensor.layout_over_ranks
    return layout.is_shard and layout.outer == 1 and layout.dim == dim % tensor.ndim


def _log_softmax(func: Function, args: Args, kwargs: Kwargs) -> Tree:
    x, dim, in_float = args
    if not _over_classes(x, dim):
        return NotImplemented
    local = x.local.float() if in_float else x.local
    highest = x.ranks.reduced(local.amax(dim, keepdim=True), dist.ReduceOp.MAX)
    shifted = local - highest
    total = x.ranks.reduced(shifted.exp().sum(dim, keepdim=True))
    return SplitTensor(shifted - total.log(), x.layout_over_ranks, x.ranks)


def _log_softmax_backward(func: Function, args: Args, kwargs: Kwargs) -> Tree:
    grad, output, dim, dtype = args
    if not _over_classes(output, dim):
        return NotImplemented
    own = grad.local if isinstance(grad, SplitTensor) else output.ranks.part(grad, _layout(output))
    total = getattr(grad, "row_sums", None)  # known where it comes from the loss below
    if total is None:
        total = output.ranks.reduced(own.sum(dim, keepdim=True))
    local = (own - output.local.exp() * total).to(dtype)
    return SplitTensor(local, _layout(output), output.ranks)


def _layout(tensor: SplitTensor) -> Layout:
    return tensor.layout_over_ranks


def _own_target(x: SplitTensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Places of the targets among this rank's classes, and which of them lie there."""
    count = x.local.shape[-1]
    own = target - x.ranks.rank * count
    is_own = (own >= 0) & (own < count)
    return own.where(is_own, 0).unsqueeze(-1), is_own


def _weights(x: SplitTensor, target: Tensor, weight: Tensor | None, ignored: int) -> Tensor:
    """Weight of each row in the loss."""
    counts = target != ignored
    if weight is None:
        return counts.to(x.dtype)
    return weight[target.where(counts, 0)] * counts


def _over_rows(x: Tree) -> bool:
    """Whether each rank has some of the rows of a loss."""
    return isinstance(x, SplitTensor) and x.ndim == 2 and _layout(x).is_shard and not _layout(x).dim


def _nll_loss_of_rows(func: Function, args: Args) -> Tree:
    """This rank's summand of the mean or the sum over all rows."""
    x, target, weight, reduction, ignored = args
    own = x.ranks.part(target, _layout(x))
    losses, _ = func(x.local, own, weight, _SUM, ignored)
    counts = (target != ignored).to(x.dtype)
    total = (counts if weight is None else weight[target.where(counts > 0, 0)] * counts).sum()
    return SplitTensor(losses / total if reduction == _MEAN else losses, PARTIAL, x.ranks), total


def _nll_loss_of_rows_backward(func: Function, args: Args) -> Tree:
    grad, x, target, weight, reduction, ignored, total = args
    own = x.ranks.part(target, _layout(x))
    local = func(grad, x.local, own, weight, reduction, ignored, total)
    return SplitTensor(local, _layout(x), x.ranks)


def _nll_loss(func: Function, args: Args, kwargs: Kwargs) -> Tree:
    x, target, weight, reduction, ignored = args
    if _over_rows(x) and reduction != _NONE and not isinstance(target, SplitTensor):
        return _nll_loss_of_rows(func, args)
    if not _over_classes(x, -1):
        return NotImplemented
    places, is_own = _own_target(x, target)
    picked = x.local.gather(-1, places).squeeze(-1) * is_own
    weights = _weights(x, target, weight, ignored)
    losses = -x.ranks.reduced(picked) * weights
    total = weights.sum()
    if reduction == _NONE:
        return losses, total.new_zeros(())
    return (losses.sum() / total if reduction == _MEAN else losses.sum()), total


def _nll_loss_backward(func: Function, args: Args, kwargs: Kwargs) -> Tree:
    grad, x, target, weight, reduction, ignored, total = args
    if _over_rows(x) and reduction != _NONE:
        return _nll_loss_of_rows_backward(func, args)
    if not _over_classes(x, -1):
        return NotImplemented
    places, is_own = _own_target(x, target)
    rows = -_weights(x, target, weight, ignored) * grad
    rows = (rows / total if reduction == _MEAN else rows).unsqueeze(-1)
    local = torch.zeros_like(x.local).scatter(-1, places, rows * is_own.unsqueeze(-1))
    made = SplitTensor(local, _layout(x), x.ranks)
    made.__dict__["row_sums"] = rows
    return made


def allow_split_vocabulary() -> None:
    """Let split tensors look tokens up in tables split by rows, and take losses over classes."""
    SplitTensor.functions[functional.embedding] = _embedding
    SPECIAL.update(
        {
            "_log_softmax": _log_softmax,
            "_log_softmax_backward_data": _log_softmax_backward,
            "nll_loss_forward": _nll_loss,
            "nll_loss_backward": _nll_loss_backward,
        }
    )
