"""Weights of all experts of which a rank has its own, rank by rank in one process."""

import pytest
import torch
from torch.nn import functional

from planner.runtime.experts import Experts, even_rows
from planner.runtime.own_experts import OwnExperts
from planner.runtime.split_tensor import Ranks
from planner.runtime.unread import SplitError

EXPERTS, WIDTH, RANKS = 6, 8, 3
OWN = EXPERTS // RANKS


@pytest.fixture
def whole():
    torch.manual_seed(0)
    return torch.randn(EXPERTS, WIDTH, WIDTH, requires_grad=True)


def parts_of(whole):
    return [
        OwnExperts.of(whole[rank * OWN : (rank + 1) * OWN], rank * OWN, EXPERTS)
        for rank in range(RANKS)
    ]


def test_they_look_like_all(whole):
    for part in parts_of(whole):
        assert part.shape == whole.shape
        assert (part.size(0), part.ndim, part.dtype) == (EXPERTS, 3, whole.dtype)
        assert part.transpose(1, 2).mT.shape == whole.shape


@pytest.mark.parametrize("transposed", [True, False])
def test_rows_of_own_experts_are_multiplied(whole, transposed):
    """All rows are of experts of one rank, as they are when they have come to it."""
    for rank, part in enumerate(parts_of(whole)):
        rows = torch.randn(5, WIDTH)
        counts = torch.zeros(EXPERTS, dtype=torch.int32)
        counts[rank * OWN] = 2
        counts[rank * OWN + 1] = 3
        ends = counts.cumsum(0, dtype=torch.int32)
        expected = functional.grouped_mm(rows, whole.mT if transposed else whole, offs=ends)
        found = functional.grouped_mm(rows, part.mT if transposed else part, offs=ends)
        assert torch.equal(found, expected)


def test_experts_are_chosen_by_their_numbers_among_all(whole):
    for rank, part in enumerate(parts_of(whole)):
        numbers = torch.tensor([rank * OWN + 1, rank * OWN, rank * OWN + 1])
        assert torch.equal(part[numbers], whole[numbers])
        assert torch.equal(part[numbers[0]], whole[numbers[0]])
        assert torch.equal(part[numbers, :2], whole[numbers, :2])
    (gradient,) = torch.autograd.grad(parts_of(whole)[1][torch.tensor([3, 3])].sum(), whole)
    assert gradient[3].eq(2).all()
    assert not gradient[[0, 1, 2, 4, 5]].any()


@pytest.mark.parametrize(
    "run",
    [
        *(lambda w: w.sum(), lambda w: w + 1, lambda w: w.transpose(0, 1), lambda w: w.view(-1)),
        *(lambda w: w[0], lambda w: w[1:3], lambda w: w[torch.tensor([True] * EXPERTS)]),
    ],
)
def test_what_reads_all_experts_is_refused(whole, run):
    with pytest.raises(SplitError):
        run(parts_of(whole)[0])


@pytest.mark.parametrize(("rows", "ranks"), [(7, 3), (2, 4), (0, 2), (8, 2)])
def test_without_data_each_rank_gets_as_many_rows(rows, ranks):
    sent = torch.empty(ranks, 2)
    to, come = even_rows(sent, sent, rows)
    assert to == come
    assert sum(to) == rows
    assert max(to) - min(to) <= 1


def test_tensors_that_tell_no_experts_are_named():
    experts = Experts("ffn.experts", (), EXPERTS, Ranks(rank=0, size=RANKS, group=None), edges=())
    with pytest.raises(Exception, match=r"ffn.experts is to take rows, .* \(4, 8\), \(4, 8\)"):
        experts.enter(torch.nn.Linear(1, 1), (torch.ones(4, WIDTH), torch.ones(4, WIDTH)), {})
