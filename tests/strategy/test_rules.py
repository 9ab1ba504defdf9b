"""Legal degrees and configurations, and the reasons for those that are not."""

from dataclasses import replace
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.graph.analysis.loss_rows import LossRows
from planner.strategy.configuration import Configuration
from planner.strategy.facts import ModelFacts
from planner.strategy.fixed_rules import chunk_rule, recomputation_rule, stream_rule
from planner.strategy.mesh import ParallelDegrees
from planner.strategy.rules import (
    BrokenRule,
    FixedValues,
    broken_rule,
    configurations,
    divisors,
    enumerate_degrees,
    heads_rule,
)

FACTS = ModelFacts(
    heads=(8,),
    kv_heads=(4,),
    vocabularies=(128,),
    sequence=64,
    experts=(8,),
    max_stages=10,
    recompute_refusals={},
)


@given(st.integers(1, 300))
def test_divisors_divide_and_none_is_missing(number):
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


@given(st.integers(1, 96))
def test_every_product_of_degrees_is_enumerated_once(gpus):
    found = list(enumerate_degrees(gpus, FixedValues()))
    assert all(degrees.world_size == gpus for degrees in found)
    assert len(set(found)) == len(found)
    quadruples = sum(
        1 for a in divisors(gpus) for b in divisors(gpus // a) for _ in divisors(gpus // a // b)
    )
    assert len(found) == quadruples


def test_fixed_degrees_are_kept():
    found = list(enumerate_degrees(8, FixedValues(tp=2, pp=2)))
    assert {(d.tp, d.pp) for d in found} == {(2, 2)}
    assert {prod((d.dp_replicate, d.dp_shard)) for d in found} == {2}


@given(st.integers(1, 96))
def test_cp_takes_ranks_beside_those_of_tp(gpus):
    found = list(enumerate_degrees(gpus, FixedValues(), contexts=True))
    assert len(set(found)) == len(found)
    assert all(each.world_size == gpus for each in found)
    assert set(found) == {replace(each, tp=each.cp, cp=each.tp) for each in found}
    assert {each.tp * each.cp for each in found} == set(divisors(gpus))


def test_cp_is_tried_where_it_is_asked_for():
    assert {each.cp for each in enumerate_degrees(8, FixedValues())} == {1}
    assert {each.cp for each in enumerate_degrees(8, FixedValues(cp=4))} == {4}
    assert {each.cp for each in enumerate_degrees(8, FixedValues(cp=1), contexts=True)} == {1}


@given(st.integers(1, 96))
def test_ep_takes_the_ranks_of_tp_and_cp_and_some_of_dp_shard(gpus):
    found = list(enumerate_degrees(gpus, FixedValues(), contexts=True, experts=True))
    assert len(set(found)) == len(found)
    assert all(each.world_size == gpus for each in found)
    shared = [each for each in found if each.ep > 1]
    ranks = [each.tp * each.cp for each in shared]
    for each, inside in zip(shared, ranks, strict=True):
        assert each.ep % inside == 0
        assert each.expert_shards * each.ep == each.dp_shard * inside
    without = [each for each in found if each.ep == 1]
    assert len(found) == sum(
        len(divisors(each.dp_shard)) + (each.tp * each.cp > 1) for each in without
    )


def test_ep_is_tried_where_it_is_asked_for():
    assert {each.ep for each in enumerate_degrees(8, FixedValues())} == {1}
    asked = list(enumerate_degrees(8, FixedValues(ep=4)))
    assert {each.ep for each in asked} == {4}
    assert {each.tp for each in asked} == {1, 2, 4, 8}, "8 is refused with a reason"
    assert {each.ep for each in enumerate_degrees(8, FixedValues(ep=1), experts=True)} == {1}


@pytest.mark.parametrize(
    ("degrees", "sizes", "rule", "words"),
    [
        ({"cp": 16}, {}, "heads % cp", "heads 8 % cp 16 = 8; cp can be 1, 2, 4, 8"),
        ({"cp": 4}, {"heads": (6,), "kv_heads": (6,)}, "heads % cp", "6 % cp 4 = 2"),
        ({"cp": 4}, {"sequence": 65}, "sequence % cp", "sequence 65 % cp 4 = 1; cp can be 1, 5"),
        ({"cp": 2}, {"sequence": None}, "cp needs a sequence", "(batch, sequence, features)"),
        ({"cp": 2, "tp": 2, "ep": 2}, {}, "ep % cp * tp", "ep 2 % (cp 2 * tp 2 = 4) = 2: the"),
        ({"ep": 16}, {}, "experts % ep", "experts 8 % ep 16 = 8; ep can be 1, 2, 4, 8"),
        ({"ep": 3}, {"experts": (6, 8)}, "experts % ep", "experts 8 % ep 3 = 2"),
        ({"ep": 2}, {"experts": ()}, "ep needs experts", "no module of a block takes (tokens,"),
        ({"ep": 2, "tp": 4}, {}, "ep % tp", "ep 2 % tp 4 = 2: the ranks of tp are among those"),
        ({"ep": 2, "cp": 4}, {}, "ep % cp", "ep 2 % cp 4 = 2: the ranks of cp are among those"),
    ],
)
def test_what_an_axis_does_not_divide_is_refused(degrees, sizes, rule, words):
    found = broken_rule(ParallelDegrees(**degrees), replace(FACTS, **sizes), 64)
    assert found.rule == rule
    assert words in found.detail


def test_ranks_of_cp_share_the_state():
    degrees = ParallelDegrees(dp_shard=2, cp=4)
    found = configurations(degrees, FACTS, 8, FixedValues())
    assert {each.reshard_after_forward for each in found} == {True, False}
    alone = configurations(ParallelDegrees(cp=4), FACTS, 8, FixedValues())
    assert {each.reshard_after_forward for each in alone} == {True, False}
    assert degrees.shards == 8
    assert degrees.dp == 2


def test_autocast_in_the_model_refuses_stages():
    facts = replace(FACTS, autocast="model.py:57")
    assert broken_rule(ParallelDegrees(tp=2, dp_shard=2), facts, 64) is None
    rule = broken_rule(ParallelDegrees(pp=2), facts, 64)
    assert rule.rule == "autocast with pp"
    assert "model.py:57" in rule.detail


def test_kv_heads_refuse_with_the_values_that_work():
    rule = heads_rule(ParallelDegrees(tp=8), FACTS, FixedValues())
    assert rule == BrokenRule(
        rule="kv_heads % tp",
        detail="kv_heads 4 % tp 8 = 4; tp can be 1, 2, 4, or fixed: attention is then whole on "
        "each rank",
    )


def test_heads_that_tp_does_not_divide_are_tried_where_tp_is_asked_for():
    degrees = ParallelDegrees(tp=8)
    assert heads_rule(degrees, FACTS, FixedValues(tp=8)) is None
    assert broken_rule(degrees, FACTS, 64) is None
    assert heads_rule(ParallelDegrees(tp=4), FACTS, FixedValues()) is None


def test_batch_and_stages_refuse_and_odd_tables_stay_whole():
    odd = replace(FACTS, heads=(), kv_heads=(), vocabularies=(50257,), max_stages=4)
    assert broken_rule(ParallelDegrees(tp=2), odd, 64) is None
    assert not odd.can_split_tables(2)
    assert replace(odd, vocabularies=(50304,)).can_split_tables(2)
    assert broken_rule(ParallelDegrees(pp=8), odd, 64).rule == "stages > cuts"
    refused = broken_rule(ParallelDegrees(dp_shard=7), odd, 64)
    assert refused.rule == "global_batch_size % dp"
    assert "dp can be 1, 2, 4" in refused.detail


def test_configurations_use_the_whole_batch():
    degrees = ParallelDegrees(dp_shard=2, tp=2, pp=2)
    found = list(configurations(degrees, FACTS, 32, FixedValues()))
    assert all(isinstance(c, Configuration) for c in found)
    assert all(c.microbatch_size * c.num_microbatches * 2 == 32 for c in found)
    assert {c.schedule for c in found} == {"1F1B", "GPipe", "Interleaved1F1B"}
    assert all(c.schedule != "GPipe" or c.num_microbatches < 2 for c in found)
    assert {c.sequence_parallel for c in found} == {True, False}


def test_a_fixed_microbatch_that_does_not_divide_is_refused():
    (found,) = configurations(ParallelDegrees(), FACTS, 12, FixedValues(microbatch_size=5))
    assert isinstance(found, BrokenRule)
    assert "12 samples" in found.detail


def test_a_fixed_schedule_that_cannot_run_is_refused():
    (found,) = configurations(
        ParallelDegrees(pp=8), FACTS, 4, FixedValues(schedule="1F1B", microbatch_size=1)
    )
    assert isinstance(found, BrokenRule)
    assert "4 < 8" in found.detail


@pytest.mark.parametrize(
    ("fixed", "stages"),
    [
        (FixedValues(schedule="Interleaved1F1B"), 4),
        (FixedValues(schedule="ZBVZeroBubble"), 4),
        (FixedValues(virtual_stages=3), 6),
    ],
)
def test_stages_that_cuts_do_not_allow_are_refused_with_their_number(fixed, stages):
    facts = replace(FACTS, max_stages=3)
    (found,) = configurations(ParallelDegrees(pp=2), facts, 8, fixed)
    assert found.rule == "stages > cuts"
    assert f"needs {stages} stages" in found.detail
    assert "cut into 3 at most" in found.detail


def test_sequence_parallelism_that_is_asked_for_is_refused_where_it_cannot_be():
    asked, degrees = FixedValues(sequence_parallel=True), ParallelDegrees(tp=2)
    odd, none = replace(FACTS, sequence=7), replace(FACTS, sequence=None)
    assert "7 % tp 2 = 1; tp can be 1, 7" in stream_rule(degrees, odd, asked).detail
    assert "one tensor of (batch, sequence, features)" in stream_rule(degrees, none, asked).detail
    assert stream_rule(degrees, FACTS, asked) is None
    assert stream_rule(ParallelDegrees(), none, asked) is None
    assert stream_rule(degrees, none, FixedValues()) is None


def test_a_recomputation_that_would_fail_is_refused_where_it_is_fixed():
    facts = replace(FACTS, recompute_refusals={"selective": "relu_ changes what mm made"})
    fixed = FixedValues(activation_checkpointing="selective")
    assert "relu_ changes what mm made" in recomputation_rule(facts, fixed).detail
    assert recomputation_rule(facts, FixedValues()) is None
    assert recomputation_rule(facts, FixedValues(activation_checkpointing="full")) is None
    assert recomputation_rule(FACTS, fixed) is None


ROWS = LossRows(
    module="head", rows=8192, classes=131_072, states=0, weights=(1,), forward_ops=(2,),
    backward_ops=(3,),
)  # fmt: skip


def chunks_of(fixed, *, size=1, **degrees):
    facts = replace(FACTS, loss=ROWS)
    fixed = replace(fixed, microbatch_size=size)
    found = configurations(ParallelDegrees(**degrees), facts, 16, fixed)
    return {each.loss_chunks if isinstance(each, Configuration) else each.rule for each in found}


def test_large_logits_are_taken_in_chunks_of_a_gibibyte():
    assert chunks_of(FixedValues()) == {4}
    assert chunks_of(FixedValues(), size=4) == {16}
    assert chunks_of(FixedValues(), pp=2) == {4}
    assert chunks_of(FixedValues(), tp=2) == {2}
    assert chunks_of(FixedValues(), tp=3) == {4}  # which leaves the classes whole
    assert chunks_of(FixedValues(), cp=2) == {2}
    assert chunks_of(FixedValues(), cp=2, tp=2) == {1}
    assert chunks_of(FixedValues(loss_chunks=1)) == {1}
    assert chunks_of(FixedValues(loss_chunks=64)) == {64}
    assert chunks_of(FixedValues(loss_chunks=7)) == {"rows % loss_chunks"}
    assert chunks_of(FixedValues(loss_chunks=8192)) == {8192}
    assert chunks_of(FixedValues(loss_chunks=8192), tp=2) == {8192}
    assert chunks_of(FixedValues(loss_chunks=8192), cp=2) == {"rows % loss_chunks"}


def test_chunks_that_cannot_be_are_refused_where_they_are_fixed():
    fixed, facts = FixedValues(loss_chunks=4), replace(FACTS, loss=ROWS)
    assert chunk_rule(facts, fixed) is None
    other = replace(FACTS, loss="softmax works on more than a row")
    assert chunk_rule(other, FixedValues(loss_chunks=1)) is None
    assert "softmax works on more" in chunk_rule(other, fixed).detail
