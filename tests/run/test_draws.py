"""What a step draws is the same in all layouts, where ranks must agree and where they recompute."""

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

MODEL = Path(__file__).with_name("masked_frames.py")
DRAWING_BLOCKS = f"""
import sys
sys.path.insert(0, {str(MODEL.parent)!r})
from masked_frames import Block, Model, example_batch, loss_fn


def build_model():
    return Model(Block)
"""

STAGED = {"pp": 2, "microbatch_size": 2}
LAYOUTS = {
    "1f1b": (2, {**STAGED, "schedule": "1F1B"}),
    "interleaved": (2, {**STAGED, "schedule": "Interleaved1F1B"}),
    "zbv": (2, {**STAGED, "schedule": "ZBVZeroBubble"}),
    "staged_dp": (4, {**STAGED, "dp_shard": 2}),
    "dp": (2, {"dp_shard": 2, "microbatch_size": 2}),
}
"""By name: processes, and what is fixed."""


def check(model, folder, gpus, fix):
    result = planner.plan(
        str(model), gpus=gpus, cluster="cpu", dtype="float64", global_batch_size=16, fix=fix
    )
    result.save(folder)
    run_jobs([(folder, arguments_of(folder, name="reference", extra=("--reference",)))])
    run_jobs([(folder, arguments_of(folder))], num_processes=gpus)
    expected, found = outcome_of(folder, name="reference"), outcome_of(folder)
    assert largest_difference(found.losses, expected.losses) < 1e-8
    assert largest_weight_difference(found.weights, expected.weights) < 1e-8
    assert result.best.num_microbatches > 1


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_stages_and_ranks_draw_the_masks_of_one_process(name, tmp_path):
    gpus, fix = LAYOUTS[name]
    check(MODEL, tmp_path, gpus, fix)


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_a_block_that_runs_again_draws_what_it_drew(kind, tmp_path):
    model = tmp_path / "model.py"
    model.write_text(DRAWING_BLOCKS)
    fix = {"dp_shard": 2, "microbatch_size": 2, "activation_checkpointing": kind}
    check(model, tmp_path / "out", 2, fix)
