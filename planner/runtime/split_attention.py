"""Attention over tokens that are split over ranks."""

from torch import Tensor
from torch.nn import functional

from .layout import Layout, shard
from .op_rules import head_copies
from .split_tensor import Ranks, SplitTensor, changed, layout_inside
from .trees import Tree
from .unread import SplitError

_TOKENS = shard(2)
_HEADS = 1
"""Dim of the heads."""


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Tree, **kwargs: Tree) -> Tensor:
    """Attend to all tokens with a part of the heads, and go back to a part of the tokens.

    Jacobs et al. 2023 (2309.14509): what attention reads changes places between ranks, so that
    masks stay as they are, and causal ones leave all ranks the same work.
    """
    operands = (query, key, value)
    attend = functional.scaled_dot_product_attention
    if not all(isinstance(x, SplitTensor) and x.layout_over_ranks == _TOKENS for x in operands):
        return attend(*operands, *args, **kwargs)
    assert isinstance(query, SplitTensor)
    ranks = query.ranks
    if query.shape[_HEADS] // _pieces(query) % ranks.size:
        raise SplitError(f"{query.shape[_HEADS]} heads do not divide over the ranks that have them")
    q, k, v = (changed(_sent(x, ranks), _heads(x), ranks) for x in operands)
    return changed(attend(q, k, v, *args, **kwargs), _TOKENS, ranks)


def _pieces(heads: Tensor) -> int:
    """Parts of the heads that the axis inside has, each of which is split."""
    inside = layout_inside(heads)
    if not (inside.is_shard and inside.dim == _HEADS):
        return 1
    assert isinstance(heads, SplitTensor)
    assert isinstance(heads.local, SplitTensor)
    return inside.outer * heads.local.ranks.size


def _heads(tensor: Tensor) -> Layout:
    return shard(_HEADS, _pieces(tensor))


def _sent(heads: Tensor, ranks: Ranks) -> Tensor:
    """Repeat the heads of grouped queries where there are not enough for all ranks."""
    copies = head_copies(heads.shape[_HEADS] // _pieces(heads), ranks.size)
    return heads if copies == 1 else heads.repeat_interleave(copies, _HEADS)


def allow_split_tokens() -> None:
    """Let attention read queries, keys and values that are split over the tokens."""
    SplitTensor.functions[functional.scaled_dot_product_attention] = _attention
