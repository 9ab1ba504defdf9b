"""Ops that torch looks at in Python take longer, in each of the ways in which it does."""

import pytest
import torch
import torch.distributed as dist

from planner.checking.fake_world import fake_group
from planner.profiling.dispatch_terms import (
    BLOCKS,
    MORE_OPS,
    SPLIT,
    SPLIT_LONGER,
    dispatched_ops,
    time_dispatch,
)
from planner.runtime.recompute import SAVED_OPS

PRODUCTS = {op.overloadpacket.__name__ for op in SAVED_OPS}


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_way_takes_longer_than_none(ranks):
    """The least of several: other processes slow some of them down."""
    with fake_group(0, ranks):
        rounds = [time_dispatch(dist.group.WORLD, torch.device("cpu")) for _ in range(3)]
    least = {way: min(each[way].p10_s for each in rounds) for way in rounds[0]}
    assert set(least) == {"none", "full", "selective", SPLIT, SPLIT_LONGER}
    assert least[SPLIT_LONGER] > 1.1 * least[SPLIT]
    for way in ("full", "selective", SPLIT):
        assert least[way] > 1.5 * least["none"]
    assert least["selective"] > least["full"]


def test_without_a_group_nothing_is_split():
    assert set(time_dispatch(None, torch.device("cpu"))) == {"none", "full", "selective"}


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_runs_again_selectively_are_no_products(ranks):
    with fake_group(0, ranks):
        ops = dispatched_ops(dist.group.WORLD, torch.device("cpu"))
    names = {part: [row["kernel"] for row in ops[part]] for part in ("forward", "again")}
    assert not PRODUCTS & set(names["again"])
    products = [name for name in names["forward"] if name in PRODUCTS]
    assert len(names["forward"]) == len(names["again"]) + len(products)
    assert len(products) == BLOCKS * 5  # four products with weights and attention


def test_ops_on_parts_are_those_between_the_ends_of_split_modules():
    """Norms and what is added to the stream run on whole tensors."""
    with fake_group(0, 2):
        counts = dispatched_ops(dist.group.WORLD, torch.device("cpu"))["num_split"]
    split = counts[SPLIT]
    # Forward, backward to the input and to the weight of a product; attention, gelu, and the sums
    # that are gradients of two biases.
    assert split >= BLOCKS * (4 * 3 + 2 + 2 + 2)
    assert split < BLOCKS * 30
    assert counts[SPLIT_LONGER] == split + BLOCKS * 2 * MORE_OPS  # forward and backward
    assert dispatched_ops(None, torch.device("cpu"))["num_split"] == {}
