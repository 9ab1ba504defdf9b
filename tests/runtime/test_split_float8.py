"""Products in float8 of parts beside those of whole tensors."""

import pytest
import torch

from planner.runtime.float8 import Float8Linear
from planner.runtime.layout import PARTIAL, REPLICATE_PARTIAL_GRAD, Layout, shard
from planner.runtime.split_float8 import SplitFloat8Linear
from planner.runtime.split_tensor import Ranks, layout_of, unwrapped, wrapped
from planner.runtime.unread import SplitError

ROWS, INNER, COLUMNS, RANKS = 32, 64, 96, 2
WHOLE = REPLICATE_PARTIAL_GRAD

LAYOUTS: dict[str, tuple[Layout, Layout, Layout]] = {
    "columns": (WHOLE, shard(0), shard(1)),
    "rows": (shard(1), shard(1), PARTIAL),
    "tokens": (shard(0), WHOLE, shard(0)),
    "tokens_of_samples": (shard(0, 4), WHOLE, shard(0, 4)),
    "fused_columns": (WHOLE, shard(0, 3), shard(1, 3)),
}
"""Layouts of what is multiplied, of the weight, and of what it makes."""


def drawn(*shape, seed):
    """Values of a few binades, so that no scale leaves any of them next to nothing."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return (signs * (0.25 + torch.rand(shape, generator=generator))).bfloat16()


def layer_of(weight, kind):
    layer = torch.nn.Linear(INNER, COLUMNS, bias=False, dtype=torch.bfloat16)
    layer.__class__ = kind
    layer.__dict__["weight"] = weight
    return layer


def ranks_of(rank, level=0):
    return Ranks(rank=rank, size=RANKS, group=None, level=level)


def part_of(tensor, layout, ranks):
    return ranks.part(tensor, layout) if layout.is_shard else tensor


def whole_from(parts, layout):
    """A tensor from what ranks have of it: parts, or summands."""
    if not layout.is_shard:
        return sum(part.float() for part in parts)
    pieces = [part.unflatten(layout.dim, (layout.outer, -1)) for part in parts]
    return torch.cat(pieces, layout.dim + 1).flatten(layout.dim, layout.dim + 1).float()


def whole_product(rows, weight, sent):
    rows, weight = rows.clone().requires_grad_(), weight.clone().requires_grad_()
    result = layer_of(weight, Float8Linear)(rows)
    result.backward(sent)
    return result, rows.grad, weight.grad


def close(found, expected):
    """Equal but for the order of sums in bfloat16."""
    largest = expected.float().abs().max()
    torch.testing.assert_close(
        found.float() / largest, expected.float() / largest, atol=8e-3, rtol=0
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_multiply_as_the_whole_does(layout):
    of_rows, of_weight, of_result = LAYOUTS[layout]
    rows, weight = drawn(ROWS, INNER, seed=0), drawn(COLUMNS, INNER, seed=1)
    sent = drawn(ROWS, COLUMNS, seed=2)
    found = []
    for ranks in map(ranks_of, range(RANKS)):
        own = [
            part_of(each, how, ranks).clone().requires_grad_()
            for each, how in ((rows, of_rows), (weight, of_weight))
        ]
        shown = [wrapped(each, how, ranks) for each, how in zip(own, LAYOUTS[layout], strict=False)]
        result = layer_of(shown[1], SplitFloat8Linear)(shown[0])
        assert layout_of(result, ranks) == of_result
        assert result.shape == (ROWS, COLUMNS)
        local = unwrapped(result)
        local.backward(part_of(sent, of_result, ranks))
        found.append((local.detach(), own[0].grad, own[1].grad))
    expected = whole_product(rows, weight, sent)
    backs = (of_result, of_rows, of_weight)
    for parts, how, wanted in zip(zip(*found, strict=True), backs, expected, strict=True):
        close(whole_from(parts, how), wanted)


def test_parts_may_be_split_in_turn():
    """Over tp by columns inside the tokens of a rank of cp."""
    rows, weight = drawn(ROWS, INNER, seed=0), drawn(COLUMNS, INNER, seed=1)
    sent = drawn(ROWS, COLUMNS, seed=2)
    outer, inner = shard(0), shard(0)
    results, gradients = [], []
    for context in (ranks_of(rank, level=1) for rank in range(RANKS)):
        of_rank = part_of(rows, outer, context)
        for ranks in map(ranks_of, range(RANKS)):
            own = part_of(weight, inner, ranks).clone().requires_grad_()
            shown = wrapped(wrapped(own, inner, ranks), WHOLE, context)
            tokens = wrapped(wrapped(of_rank, WHOLE, ranks), outer, context)
            result = layer_of(shown, SplitFloat8Linear)(tokens)
            local = unwrapped(unwrapped(result))
            local.backward(part_of(part_of(sent, outer, context), shard(1), ranks))
            results.append(local.detach())
            gradients.append(own.grad)
    expected, _, of_weight = whole_product(rows, weight, sent)
    halves = [whole_from(results[i : i + RANKS], shard(1)) for i in (0, RANKS)]
    close(whole_from(halves, outer), expected)
    summed = [gradients[i].float() + gradients[i + RANKS].float() for i in range(RANKS)]
    close(whole_from(summed, inner), of_weight)


@pytest.mark.parametrize(
    ("columns", "of_rows", "of_weight", "reason"),
    [
        (16, WHOLE, shard(0), r"\(8, 64\), and products in float8 take multiples of 16"),
        (COLUMNS, shard(1), shard(0), "no rule says how it runs on the parts"),
        (COLUMNS, PARTIAL, shard(0), "no rule says how it runs on the parts"),
    ],
)
def test_what_ranks_cannot_multiply_is_refused(columns, of_rows, of_weight, reason):
    ranks = ranks_of(0)
    rows, weight = drawn(ROWS, INNER, seed=0), drawn(columns, INNER, seed=1)
    shown = [
        wrapped(part_of(each, how, ranks), how, ranks)
        for each, how in ((rows, of_rows), (weight, of_weight))
    ]
    with pytest.raises(SplitError, match=reason):
        layer_of(shown[1], SplitFloat8Linear)(shown[0])
