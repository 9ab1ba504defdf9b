"""Frozen weights with trained adapters train as on one process; adapters alone have moments."""

from pathlib import Path

import pytest
from launch import (
    arguments_of,
    largest_difference,
    largest_weight_difference,
    outcome_of,
    run_jobs,
)
from torch.distributed.checkpoint import FileSystemReader

import planner

pytestmark = pytest.mark.run

MODEL = Path(__file__).with_name("lora_llama.py")

LAYOUTS = {
    "zero_3": {"dp_shard": 2},
    "zero_2": {"dp_shard": 2, "reshard_after_forward": False},
    "replicas": {"dp_replicate": 2},
    "tensor_parallel": {"tp": 2, "sequence_parallel": True},
    "pipeline": {"pp": 2, "schedule": "1F1B"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    jobs = []
    for name, fixed in LAYOUTS.items():
        result = planner.estimate(
            str(MODEL), gpus=2, cluster="cpu", dtype="float64", seq_len=16, global_batch_size=8,
            fix={"microbatch_size": 2, **fixed},
        )  # fmt: skip
        result.save(root / name)
        jobs.append((root / name, arguments_of(root / name)))
    first = root / "zero_3"
    run_jobs([(first, arguments_of(first, name="reference", extra=("--reference",)))])
    run_jobs(jobs, num_processes=2)
    return root


@pytest.mark.parametrize("name", LAYOUTS)
def test_adapters_train_as_on_one_process(folders, name):
    expected = outcome_of(folders / "zero_3", name="reference")
    found = outcome_of(folders / name)
    assert largest_difference(found.losses, expected.losses) < 1e-8
    assert largest_difference(found.grad_norms, expected.grad_norms) < 1e-8
    assert largest_weight_difference(found.weights, expected.weights) < 1e-8


@pytest.mark.parametrize("run", ["zero_3/run", "zero_3/reference", "pipeline/run"])
def test_checkpoints_hold_moments_of_adapters_alone(folders, run):
    metadata = FileSystemReader(folders / run / "step-00000003").read_metadata()
    names = set(metadata.state_dict_metadata)
    weights = {name.removeprefix("weights.") for name in names if name.startswith("weights.")}
    adapters = {name for name in weights if "lora_" in name}
    assert adapters
    assert adapters < weights
    for kind in ("exp_avg", "exp_avg_sq"):
        held = {name.removeprefix(f"{kind}.") for name in names if name.startswith(f"{kind}.")}
        assert held == adapters
