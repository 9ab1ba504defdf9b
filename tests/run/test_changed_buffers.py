"""Buffers that a forward changes end up as on one device, in stages and where blocks run again."""

from pathlib import Path

import pytest
from launch import arguments_of, largest_difference, largest_weight_difference, outcome_of, run_jobs

import planner

pytestmark = pytest.mark.run

MODEL = Path(__file__).with_name("learnt_codes.py")


def planned(folder, *, gpus, fix):
    result = planner.plan(
        str(MODEL),
        gpus=gpus,
        cluster="cpu",
        dtype="float64",
        global_batch_size=8,
        fix={"microbatch_size": 2, **fix},
    )
    result.save(folder)
    return result


def test_stages_of_a_rank_have_buffers_of_their_own_and_each_is_changed_by_one(tmp_path):
    fix = {"pp": 2, "virtual_stages": 2, "activation_checkpointing": "full"}
    planned(tmp_path, gpus=2, fix=fix)
    run_jobs([(tmp_path, arguments_of(tmp_path, name="reference", extra=("--reference",)))])
    run_jobs([(tmp_path, arguments_of(tmp_path))], num_processes=2)
    expected, found = outcome_of(tmp_path, name="reference"), outcome_of(tmp_path)
    assert largest_difference(found.losses, expected.losses) < 1e-8
    assert largest_weight_difference(found.weights, expected.weights) < 1e-8
    assert "quantizer.codes" in expected.buffers
    assert largest_weight_difference(found.buffers, expected.buffers) < 1e-8


def test_a_plan_says_where_ranks_train_by_buffers_of_their_own(tmp_path):
    """Batch statistics and counters are not named: training does not read them."""
    (warning,) = planned(tmp_path, gpus=2, fix={"dp_shard": 2}).warnings
    assert "the buffer quantizer.codes, and each of 2 data-parallel ranks" in warning
