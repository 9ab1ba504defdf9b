"""What a forward makes, and modules of several names, under layouts, against one process."""

import sys
from pathlib import Path

import pytest
from launch import (
    arguments_of,
    largest_difference,
    largest_weight_difference,
    outcome_of,
    run_jobs,
)

import planner

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from families import fast_links

pytestmark = pytest.mark.run

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("model", "fix"),
    [
        *(("host_masks", {axis: 2}) for axis in ("tp", "cp", "pp")),
        *(("normed_weights", {axis: 2}) for axis in ("tp", "pp", "dp_shard")),
    ],
)
def test_what_is_made_trains_as_on_one_process(model, fix, tmp_path):
    trains_as_one_process(model, fix, "cpu", tmp_path)


def test_a_module_with_two_names_is_split_once(tmp_path):
    cluster = fast_links(tmp_path)
    plan = trains_as_one_process("repeated_blocks", {"tp": 2}, cluster, tmp_path / "plan")
    split = {each.module for sharding in plan.shardings for each in sharding.modules}
    assert {"layers.0.q", "layers.0.up", "layers.0.down"} <= split


def trains_as_one_process(model, fix, cluster, tmp_path):
    """Plan a model and run its script; its plan."""
    request = {"gpus": 2, "dtype": "float64", "global_batch_size": 8, "fix": fix}
    result = planner.plan(str(HERE / f"{model}.py"), cluster=cluster, **request)
    result.save(tmp_path)
    run_jobs([(tmp_path, arguments_of(tmp_path, name="reference", extra=("--reference",)))])
    run_jobs([(tmp_path, arguments_of(tmp_path))], num_processes=2)
    expected, found = outcome_of(tmp_path, name="reference"), outcome_of(tmp_path)
    assert largest_difference(found.losses, expected.losses) < 1e-8
    assert largest_weight_difference(found.weights, expected.weights) < 1e-8
    return result.best
