"""Data decide the sizes of tensors: stages follow them, or are not cut there."""

import subprocess
import sys
from pathlib import Path

import pytest
from launch import (
    arguments_of,
    largest_difference,
    largest_weight_difference,
    outcome_of,
    run_jobs,
    torchrun,
)

import planner
from planner.checking.check import check_plan
from planner.errors import RequestError

pytestmark = pytest.mark.run

MODEL = Path(__file__).with_name("chosen_rows.py")
REQUEST = {"gpus": 2, "cluster": "cpu", "dtype": "float64", "global_batch_size": 8}
STEPS = 4


@pytest.mark.parametrize("fix", [{"pp": 2, "microbatch_size": 2}, {"tp": 2}, {"dp_shard": 2}])
def test_chosen_rows_train_as_on_one_process(fix, tmp_path):
    planner.plan(str(MODEL), **REQUEST, fix=fix).save(tmp_path)
    reference = arguments_of(tmp_path, name="reference", steps=STEPS, extra=("--reference",))
    run_jobs([(tmp_path, reference)])
    run_jobs([(tmp_path, arguments_of(tmp_path, steps=STEPS))], num_processes=2)
    expected = outcome_of(tmp_path, name="reference", steps=STEPS)
    found = outcome_of(tmp_path, steps=STEPS)
    assert largest_difference(found.losses, expected.losses) < 1e-8
    assert largest_weight_difference(found.weights, expected.weights) < 1e-8
    assert check_plan(tmp_path).traffic_holds  # a step on fake tensors takes what backward does too


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("build_read_again", "data decide the size of a tensor"),
        ("build_packed", "data decide the size of a tensor"),
        ("build_recomputed", "runs blocks.0 again in backward"),
    ],
)
def test_what_a_stage_cannot_receive_ends_none(name, reason, tmp_path):
    with pytest.raises(RequestError, match=reason):
        planner.plan(f"{MODEL}:{name}", **REQUEST, fix={"pp": 2})
    planner.plan(f"{MODEL}:{name}", **REQUEST, fix={"dp_shard": 2}).save(tmp_path)
    run_jobs([(tmp_path, arguments_of(tmp_path, steps=2))], num_processes=2)
    assert len(outcome_of(tmp_path, steps=2).losses) == 2


def test_a_mask_of_constants_chooses_as_many_rows_for_all_data():
    planner.plan(f"{MODEL}:build_constant", **REQUEST, fix={"pp": 2})


def test_data_of_another_size_than_the_stages_are_made_for_say_so(tmp_path):
    """Its loader reads 16 tokens of each sample, ``example_batch`` gives 64: gloo would receive
    them into larger buffers, and say nothing."""
    planner.plan(str(MODEL.with_name("hooked_gpt.py")), **REQUEST, fix={"pp": 2}).save(tmp_path)
    script = [str(tmp_path / "train.py"), "--steps", "1"]
    done = subprocess.run(
        [sys.executable, *torchrun(2), *script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    messages = [line for line in done.stderr.splitlines() if "train.py: error:" in line]
    assert len(messages) == 1
    assert "stage 0 sends tensors of [(" in messages[0]
    assert "let these be like the data, and plan again" in messages[0]
