"""Tiny models of families that differ most train under tensor parallelism as one process does."""

import sys
from pathlib import Path

import pytest
from in_float64 import run_scripts_in_float64
from launch import (
    arguments_of,
    largest_difference,
    largest_weight_difference,
    outcome_of,
    run_jobs,
)

import planner

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
from families import fast_links, split_words, write_config

pytestmark = pytest.mark.run

FAMILIES = {
    "gpt2": "decoder",  # Conv1D, fused projections, tied head
    "qwen3": "decoder",  # norms of heads, grouped queries
    "t5": "encoder-decoder",  # relative bias that all blocks share
    "mixtral": "experts",
    "falcon": "decoder",  # one key and value head, which attention is whole for
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    cluster = fast_links(root)
    plans, jobs, references = {}, [], []
    for name, kind in FAMILIES.items():
        config = write_config(root / name / "model", kind, name)
        result = planner.plan(
            str(config), gpus=2, cluster=cluster, dtype="float64", global_batch_size=4,
            seq_len=8, fix={"tp": 2, "microbatch_size": 4},
        )  # fmt: skip
        folder = root / name / "plan"
        result.save(folder)
        plans[name] = result.best
        jobs.append((folder, arguments_of(folder, steps=2)))
        extra = arguments_of(folder, name="reference", steps=2, extra=("--reference",))
        references.append((folder, extra))
    run_jobs(references, function=run_scripts_in_float64)
    run_jobs(jobs, num_processes=2, function=run_scripts_in_float64)
    return root, plans


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_as_one_process(folders, name):
    root, plans = folders
    blocks = len(plans[name].units) - 2
    assert split_words(plans[name]).startswith(f"{blocks}/{blocks} blocks")
    assert name != "mixtral" or "experts" in split_words(plans[name])
    expected = outcome_of(root / name / "plan", name="reference", steps=2)
    found = outcome_of(root / name / "plan", steps=2)
    assert largest_difference(found.losses, expected.losses) < 1e-8
    assert largest_weight_difference(found.weights, expected.weights) < 1e-8
