"""Tensors and weights that a forward makes, under layouts, against one process."""

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
    request = {"gpus": 2, "dtype": "float64", "global_batch_size": 8, "fix": fix}
    result = planner.plan(str(HERE / f"{model}.py"), cluster="cpu", **request)
    result.save(tmp_path)
    run_jobs([(tmp_path, arguments_of(tmp_path, name="reference", extra=("--reference",)))])
    run_jobs([(tmp_path, arguments_of(tmp_path))], num_processes=2)
    expected, found = outcome_of(tmp_path, name="reference"), outcome_of(tmp_path)
    assert largest_difference(found.losses, expected.losses) < 1e-8
    assert largest_weight_difference(found.weights, expected.weights) < 1e-8
