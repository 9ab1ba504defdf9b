"""Runs of Megatron-LM's family: what sets them apart, and how far their prices are off."""

from dataclasses import replace
from statistics import fmean

import pytest

from planner.hardware.profiles import PROFILES_FOLDER
from planner.validation.pricing.case_price import CasePricer
from planner.validation.pricing.cases import RunError, case_of
from planner.validation.pricing.workbook import WorkBook, WorkKey
from planner.validation.reading.table import read_table

RUNS = PROFILES_FOLDER / "published" / "runs"


def runs(name):
    return {run.row: run for run in read_table(RUNS / f"{name}.csv", keep_going=True).runs}


@pytest.fixture(scope="module")
def bigscience():
    return runs("bigscience_a100_176b")


@pytest.fixture(scope="module")
def zero_bubble():
    return runs("zero_bubble_table4")


@pytest.fixture(scope="module")
def pricer():
    return CasePricer()


def errors(some, pricer):
    return [
        abs(pricer.price(case_of(run)).costs.step_time_s / run.step_time_s - 1)
        for run in some
        if run.step_time_s
    ]


def memory_errors(some, pricer):
    return [
        abs(pricer.price(case_of(run)).memory.total_bytes / run.peak_mem_bytes - 1)
        for run in some
        if run.peak_mem_bytes
    ]


@pytest.mark.parametrize(
    ("table", "step", "most"),
    [
        ("vtrain_single_node", 16, 0.06),
        ("vtrain_multi_node", 3, 0.09),
        ("korthikanti2022_table5", 1, 0.04),
        ("megatron_sc21_table1", 1, 0.03),
        ("zero_bubble_table4", 1, 0.03),
        ("bigscience_a100_176b", 3, 0.065),
    ],
)
def test_step_times(table, step, most, pricer):
    some = list(runs(table).values())[::step]
    assert fmean(errors(some, pricer)) < most


def test_memory(zero_bubble, bigscience, pricer):
    assert fmean(memory_errors(zero_bubble.values(), pricer)) < 0.05
    assert fmean(memory_errors(list(bigscience.values())[::3], pricer)) < 0.08


def test_source_and_notes_choose_the_profile(zero_bubble, bigscience):
    tables = {
        "vtrain_single_node": "megatron-deepspeed-vtrain",
        "korthikanti2022_table5": "megatron",
        "megatron_sc21_table1": "megatron-sc21",
    }
    for table, name in tables.items():
        assert {case_of(run).framework.name for run in runs(table).values()} == {name}
    assert {case_of(run).framework.name for run in zero_bubble.values()} == {"megatron-zero-bubble"}
    for run in bigscience.values():
        sums = case_of(run).framework.state.gradient == 6
        assert sums == ("rebalanced" in run.notes or "reshaping" in run.source)


def test_heads_where_none_is_stated_are_those_of_the_same_width(bigscience):
    some = [run for run in bigscience.values() if run.hidden == 14400]
    assert {run.heads for run in some} == {96, None}
    assert {case_of(run).shape.heads for run in some} == {96}


def test_the_end_stages_may_hold_no_block(zero_bubble):
    interleaved = next(run for run in zero_bubble.values() if run.virtual_stages == 3)
    assert interleaved.pp * interleaved.virtual_stages == interleaved.layers + 2
    assert case_of(interleaved).run is interleaved
    with pytest.raises(RunError, match="stages per rank > layers"):
        case_of(replace(interleaved, virtual_stages=4))


def work(run, **changes):
    case = case_of(run)
    key = WorkKey(
        shape=replace(case.shape, hidden=256, ffn=1024, heads=4, kv_heads=4, **changes),
        dtype=case.dtype,
        kernels=case.framework.kernels,
        tp=2,
        sequence_parallel=False,
        microbatch_size=1,
    )
    return key, WorkBook()


def test_tensor_parallel_ranks_send_their_shares(bigscience):
    key, book = work(bigscience[0], vocab_size=512, seq_len=64)
    split = book.work(key).entering_bytes[2]
    whole = book.work(replace(key, kernels=replace(key.kernels, splits_transfers=False)))
    assert whole.entering_bytes[2] == 64 * 256 * 2 == 2 * split


def products(unit):
    works = (unit.forward, unit.input_backward, unit.weight_backward)
    return [op for each in works for op in each.ops if op.kind == "matmul"]


@pytest.mark.parametrize(("vocab_size", "share"), [(504, 1.0), (501, 0.5)])
def test_vocabularies_that_are_no_multiple_of_8_halve_the_rate_of_the_head(
    bigscience, vocab_size, share
):
    # 63 tokens are no multiple of 8 either, which is no matter.
    key, book = work(bigscience[0], vocab_size=vocab_size, seq_len=63)
    found = book.work(replace(key, tp=1))
    assert {op.alignment_share for op in products(found.units[-1])} == {share}
    linear = [op for op in products(found.units[2]) if op.batch == 1]
    assert {op.alignment_share for op in linear} == {1.0}
    assert len(products(found.units[-1])) == 3


def test_collectives_of_the_backward_pass_hide_behind_weight_gradients():
    case = case_of(runs("korthikanti2022_table5")[0])
    exposed = replace(case, framework=replace(case.framework, hides_backward_collectives=False))
    costs = [CasePricer().price(each).costs for each in (case, exposed)]
    assert costs[0].tp_comm_s < 0.6 * costs[1].tp_comm_s
    assert costs[0].compute_s == costs[1].compute_s
