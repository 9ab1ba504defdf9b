"""A module is split though what it returns, a view, is changed in place."""

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

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
from families import fast_links, split_words

pytestmark = pytest.mark.run

MODEL = Path(__file__).with_name("changed_views.py")


@pytest.mark.parametrize("fix", [{"tp": 2}, {"tp": 2, "sequence_parallel": True}])
def test_activations_in_place_are_split(fix, tmp_path):
    request = {"gpus": 2, "dtype": "float64", "global_batch_size": 8, "fix": fix}
    result = planner.plan(str(MODEL), cluster=fast_links(tmp_path), **request)
    assert split_words(result.best).startswith("3/3 blocks")
    folder = tmp_path / "out"
    result.save(folder)
    run_jobs([(folder, arguments_of(folder, name="reference", extra=("--reference",)))])
    run_jobs([(folder, arguments_of(folder))], num_processes=2)
    expected, found = outcome_of(folder, name="reference"), outcome_of(folder)
    assert largest_difference(found.losses, expected.losses) < 1e-8
    assert largest_weight_difference(found.weights, expected.weights) < 1e-8
