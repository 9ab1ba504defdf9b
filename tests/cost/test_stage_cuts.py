"""How frameworks cut models into stages, against cuts made by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.stage_cuts import leaves_ranks_empty, stage_bounds

CUTS = ("even_blocks", "even_with_ends", "by_flop")


def flops(layers, *, head=96, block=32):
    """A block of 32 multiplications per token, a head of 96; prologue and loss have none."""
    return [0, *[block] * layers, head, 0]


def counts(model, stages, cuts):
    bounds = stage_bounds(model, epilogue_units=2, stages=stages, cuts=cuts)
    return [end - first for first, end in bounds]


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        # Five blocks of 32 and a head of 96: 256 in all.
        # Half is 128, which the fifth block exceeds; head and loss are the second stage.
        (2, [6, 2]),
        # Shares end at 64, 128, 192: exceeded by the third block, the fifth, the head.
        (4, [4, 2, 1, 1]),
        # Shares of 36.6: the second block and every unit after it exceed theirs.
        (7, [3, 1, 1, 1, 1, 1, 0]),
    ],
)
def test_nanotron_ends_a_stage_with_the_unit_that_exceeds_its_share(stages, expected):
    assert counts(flops(5), stages, "by_flop") == expected


def test_larger_blocks_move_the_cut():
    # Blocks of 40, head of 40: the fourth of four blocks exceeds 120 of 200 x 2 / 3 = 133.
    assert counts(flops(4, head=40, block=40), 2, "by_flop") == [4, 3]


def test_a_job_with_more_stages_than_it_fills_fails():
    # Here the conversion of the logits is one more unit, which fills the seventh stage.
    assert not leaves_ranks_empty(flops(5), 7, "by_flop")
    assert leaves_ranks_empty(flops(5), 8, "by_flop")
    assert not leaves_ranks_empty(flops(5), 8, "even_blocks")


def test_blocks_are_divided_evenly_with_embedding_and_head_on_the_ends():
    assert counts(flops(8), 4, "even_blocks") == [3, 2, 2, 4]
    assert counts(flops(9), 4, "even_blocks") == [4, 2, 2, 4]


def test_embedding_and_head_may_count_as_blocks():
    # Qi et al. 2024: 22 blocks on 8 ranks of 3 stages, a unit each, and the loss with the head.
    assert counts(flops(22), 24, "even_with_ends") == [1] * 23 + [2]
    assert counts(flops(6), 4, "even_with_ends") == [2, 2, 2, 3]
    # BigScience: 70 blocks on 12 ranks, 6 units each.
    assert counts(flops(70), 12, "even_with_ends") == [6] * 11 + [7]
    # Where they do not make it even, they are on top.
    assert counts(flops(8), 4, "even_with_ends") == counts(flops(8), 4, "even_blocks")


@given(
    layers=st.integers(1, 100),
    stages=st.integers(1, 64),
    cuts=st.sampled_from(CUTS),
    head=st.integers(2, 4000),
)
def test_every_unit_is_on_one_stage_in_order(layers, stages, cuts, head):
    bounds = stage_bounds(flops(layers, head=head), epilogue_units=2, stages=stages, cuts=cuts)
    assert len(bounds) == stages
    units = [unit for first, end in bounds for unit in range(first, end)]
    assert units == list(range(layers + 3))


@given(layers=st.integers(1, 100), stages=st.integers(1, 64))
def test_even_stages_differ_by_a_block(layers, stages):
    bounds = stage_bounds(flops(layers), epilogue_units=2, stages=stages, cuts="even_blocks")
    blocks = [len([u for u in range(first, end) if 1 <= u <= layers]) for first, end in bounds]
    assert sum(blocks) == layers
    assert max(blocks) - min(blocks) <= 1
