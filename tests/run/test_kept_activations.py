"""What hooks keep of the inside of a block is whole where code outside of it reads it."""

import sys
from pathlib import Path

import pytest
from launch import arguments_of, largest_difference, largest_weight_difference, outcome_of, run_jobs

import planner
from planner.errors import RequestError

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
from families import fast_links

pytestmark = pytest.mark.run

MODEL = Path(__file__).with_name("kept_activations.py")


def planned(folder, **fix):
    return planner.plan(
        str(MODEL), gpus=2, cluster=fast_links(folder), dtype="float64", global_batch_size=4,
        fix={"microbatch_size": 2, **fix},
    )  # fmt: skip


def test_a_block_is_not_split_where_hooks_would_keep_a_part_of_it(tmp_path):
    planned(tmp_path, tp=2).save(tmp_path / "plan")
    folder = tmp_path / "plan"
    run_jobs([(folder, arguments_of(folder, name="reference", extra=("--reference",)))])
    run_jobs([(folder, arguments_of(folder))], num_processes=2)
    expected, found = outcome_of(folder, name="reference"), outcome_of(folder)
    assert largest_difference(found.losses, expected.losses) < 1e-8
    assert largest_weight_difference(found.weights, expected.weights) < 1e-8


def test_a_refusal_names_the_axes_that_are_left(tmp_path):
    with pytest.raises(RequestError, match=r"allow on 2 GPUs: dp_replicate, dp_shard, tp"):
        planned(tmp_path, ep=2, dp_shard=2)
