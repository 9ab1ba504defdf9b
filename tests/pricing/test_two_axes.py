"""What a rank does and holds where tp splits the parts that cp leaves: its share over both."""

from collections import Counter
from dataclasses import replace

import pytest

from planner.graph.operator_graph import UnitKind
from planner.hardware.profiles import load_cluster
from planner.pricing.choice import ShardingChoice
from planner.pricing.model_pricing import ModelPricer
from planner.units import DTYPE_BYTES

TP, CP, SIZE = 2, 4, 2


@pytest.fixture(scope="module", params=[False, True], ids=["", "sequence_parallel"])
def works(request, big_gpt):
    """A block over tp, over cp, and over both."""
    graphs = big_gpt
    pricer = ModelPricer(graphs, load_cluster("h100-sxm", gpus=8), "bfloat16")
    index = [u.index for u in graphs.at(SIZE).units if u.kind is UnitKind.BLOCK][1]
    both = ShardingChoice(
        tp=TP,
        cp=CP,
        sequence_parallel=request.param,
        split_tables=False,
        microbatch_size=SIZE,
    )
    choices = replace(both, cp=1), both.context, both
    return [pricer.work(choice).units[index] for choice in choices]


def flop_of(*passes, kind):
    return sum(op.flop for each in passes for op in each.ops if op.kind == kind)


def moved(work, *, beside=None):
    return Counter((c.kind, c.num_bytes) for c in work.comm if c.beside == beside)


@pytest.mark.parametrize("kind", ["matmul", "attention"])
def test_a_rank_computes_its_share_of_both(works, kind):
    over_tp, _, both = works
    for part in ("forward", "input_backward", "weight_backward"):
        tp, cp, found = (flop_of(getattr(each, part), kind=kind) for each in works)
        assert found == pytest.approx(tp / CP) == pytest.approx(cp / TP)
    products = [
        sorted((op.batch, op.m, op.n, op.k) for op in each.forward.ops if op.kind == "matmul")
        for each in (over_tp, both)
    ]
    assert products[1] == sorted((b, m // CP, n, k) for b, m, n, k in products[0])


def test_each_axis_moves_the_part_that_the_other_leaves(works):
    over_tp, over_cp, both = works
    assert not moved(over_tp.forward, beside="cp")
    for part in ("forward", "input_backward"):
        inner, alone = moved(getattr(both, part), beside=None), getattr(over_tp, part)
        assert inner == {(kind, size / CP): n for (kind, size), n in
                         moved(alone, beside=None).items()}  # fmt: skip
        outer, alone = moved(getattr(both, part), beside="cp"), getattr(over_cp, part)
        assert outer == {(kind, size / TP): n for (kind, size), n in
                         moved(alone, beside=None).items()}  # fmt: skip
        assert {kind for kind, _ in outer} == {"all_to_all"}


def test_parameters_are_those_over_tp(works):
    over_tp, over_cp, both = works
    assert both.trained_elements == over_tp.trained_elements < over_cp.trained_elements
    assert both.summed_gradient_elements == over_tp.summed_gradient_elements


def test_a_rank_keeps_its_share_of_both(works, big_gpt):
    """Of what attention leaves it keeps its heads, and its tokens for the projection behind."""
    over_tp, _, both = works
    graph = big_gpt.at(SIZE)
    exchanged_bytes = graph.values[graph.cuts[0].values[0]].size_bytes / TP / CP
    for kind, kept in over_tp.activation_bytes.items():
        beside = exchanged_bytes if kind == "none" else 0
        assert both.activation_bytes[kind] == pytest.approx(kept / CP + beside, rel=1e-3)


def test_bytes_are_those_of_queries_keys_and_values(works, big_gpt):
    """What ranks of cp hand out before attention, and get back behind it."""
    graph = big_gpt.at(SIZE)
    stream = graph.values[graph.cuts[0].values[0]]
    assert DTYPE_BYTES[stream.dtype] == 2
    exchanged = moved(works[2].forward, beside="cp")
    assert exchanged == {("all_to_all", stream.size_bytes / TP / CP): 4}
