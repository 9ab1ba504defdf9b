"""Losses and look-ups of which each rank has a part of the rows, rank by rank in one process."""

import pytest
import torch
from torch.nn import functional

from planner.runtime.layout import PARTIAL, REPLICATE, REPLICATE_PARTIAL_GRAD, shard
from planner.runtime.split_loss import allow_split_vocabulary
from planner.runtime.split_tensor import (
    Ranks,
    changed,
    counted_in_mean,
    layout_of,
    unwrapped,
    wrapped,
)

BATCH, TOKENS, CLASSES, SIZE = 3, 4, 7, 2


@pytest.fixture(autouse=True)
def _allowed():
    allow_split_vocabulary()
    torch.manual_seed(0)


def ranks_of(size):
    return [Ranks(rank=rank, size=size, group=None) for rank in range(size)]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weighted", [True, False])
def test_a_loss_over_parts_of_the_rows_is_a_sum(reduction, weighted):
    logits = torch.randn(BATCH * TOKENS, CLASSES, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, CLASSES, (BATCH * TOKENS,))
    targets[1:5] = -100
    weight = torch.rand(CLASSES, dtype=torch.float64) if weighted else None
    expected = functional.cross_entropy(logits, targets, weight, reduction=reduction)
    expected.backward()
    layout = shard(0, BATCH)  # the sequence is split, and lies in a dim with the batch
    total = torch.zeros((), dtype=torch.float64)
    for ranks in ranks_of(SIZE):
        own = ranks.part(logits.detach(), layout).clone().requires_grad_()
        loss = functional.cross_entropy(
            wrapped(own, layout, ranks), targets, weight, reduction=reduction
        )
        assert layout_of(loss, loss.ranks) == PARTIAL
        whole = changed(loss, REPLICATE, ranks)  # without a group, this rank's summand
        whole.backward()
        total += whole.detach()
        assert torch.allclose(own.grad, ranks.part(logits.grad, layout))
    assert torch.allclose(total, expected)


def test_a_loss_of_each_row_is_refused():
    """No rule says how what is made of it runs on parts."""
    (ranks, *_) = ranks_of(SIZE)
    logits = wrapped(torch.randn(BATCH * TOKENS // SIZE, CLASSES), shard(0), ranks)
    targets = torch.zeros(BATCH * TOKENS, dtype=torch.long)
    losses = functional.cross_entropy(logits, targets, reduction="none")
    with pytest.raises(RuntimeError, match="no rule says"):
        losses.sum()


def test_the_mean_of_gradients_of_parts_is_the_gradient():
    table = torch.randn(CLASSES, 5, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, CLASSES, (BATCH, TOKENS))
    factors = torch.randn(BATCH, TOKENS, 5, dtype=torch.float64)
    functional.embedding(ids, table).mul(factors).sum().backward()
    expected, found = table.grad.clone(), []
    for ranks in ranks_of(SIZE):
        table.grad = None
        seen = counted_in_mean(table, ranks)
        shown = changed(seen, REPLICATE_PARTIAL_GRAD, ranks, gradient=PARTIAL)
        rows = functional.embedding(changed(ids, shard(1), ranks), shown)
        assert layout_of(rows, rows.ranks) == shard(1)
        (unwrapped(rows) * ranks.part(factors, shard(1))).sum().backward()
        found.append(table.grad.clone())
    assert torch.allclose(torch.stack(found).mean(0), expected)
