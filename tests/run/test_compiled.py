"""Compiled blocks train as those that are written, and cost what fewer kernels cost."""

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
from planner.errors import CodegenError, RequestError

MODEL = Path(__file__).with_name("compiled_mlp.py")
SPLIT = Path(__file__).with_name("compiled_llama.py")
EXPERTS = Path(__file__).with_name("routed_experts.py")


def estimated(fix, *, model=str(MODEL), **options):
    fix = {"microbatch_size": 2, **fix}
    return planner.estimate(
        model, gpus=2, cluster="cpu", dtype="float64", global_batch_size=8, fix=fix, **options
    )


def trained_alike(root, model, layouts, call):
    """Train a model in some layouts, one after the other, and on one process."""
    jobs = []
    for name, fix in layouts.items():
        folder = root / name
        estimated({"compile": True, **fix}, model=str(model)).save(folder)
        assert call in (folder / "train.py").read_text()
        extra = ("--evaluate-every", "2")
        jobs.append((folder, arguments_of(folder, extra=() if "pp" in fix else extra)))
    run_jobs(jobs, num_processes=2)
    first = root / next(iter(layouts))
    run_jobs([(first, arguments_of(first, name="reference", extra=("--reference",)))])
    expected = outcome_of(first, name="reference")
    for name in layouts:
        found = outcome_of(root / name)
        assert largest_difference(found.losses, expected.losses) < 1e-8
        assert largest_difference(found.grad_norms, expected.grad_norms) < 1e-8
        assert largest_weight_difference(found.weights, expected.weights) < 1e-8


@pytest.mark.run
def test_compiled_blocks_train_as_on_one_process(tmp_path):
    layouts = {
        "zero_3": {"dp_shard": 2, "activation_checkpointing": "full"},
        "pipeline": {"pp": 2, "schedule": "1F1B", "activation_checkpointing": "selective"},
    }
    trained_alike(tmp_path, MODEL, layouts, "compile_blocks(part)")


@pytest.mark.run
@pytest.mark.parametrize(
    "fix",
    [
        {"tp": 2, "sequence_parallel": True, "activation_checkpointing": "selective"},
        pytest.param({"cp": 2, "activation_checkpointing": "full"}, marks=pytest.mark.bench),
    ],
)
def test_compiled_blocks_that_are_split_train_as_on_one_process(fix, tmp_path):
    trained_alike(tmp_path, SPLIT, {"split": fix}, "compile_split_blocks(")


def test_fewer_kernels_take_less_time_and_memory():
    plain, compiled = (estimated({"compile": compile}) for compile in (False, True))
    assert compiled.best.costs.compute_s < plain.best.costs.compute_s
    assert compiled.best.peak_memory_bytes <= plain.best.peak_memory_bytes


def test_what_is_not_traced_is_refused_before_a_script_is_written(tmp_path):
    result = estimated({"compile": True}, model=f"{MODEL}:build_broken")
    with pytest.raises(CodegenError, match=r"does not trace blocks\.0 in one graph: Unsupported"):
        result.save(tmp_path / "broken")
    assert not (tmp_path / "broken").exists()


def test_what_torch_draws_no_graph_of_is_refused_before_a_script_is_written(tmp_path):
    fix = {"tp": 2, "sequence_parallel": True, "compile": True}
    result = estimated(fix, model=f"{SPLIT}:build_branching")
    with pytest.raises(CodegenError, match=r"draws no graph of layers\.0 as it is split: .*cumsum"):
        result.save(tmp_path / "branching")
    assert not (tmp_path / "branching").exists()
    estimated({**fix, "compile": False}, model=f"{SPLIT}:build_branching").save(tmp_path / "plain")


def test_split_blocks_that_change_their_buffers_are_not_compiled(tmp_path):
    result = estimated({"tp": 2, "compile": True}, model=f"{SPLIT}:build_counting")
    with pytest.raises(CodegenError, match=r"changes its buffer layers\.0\.runs"):
        result.save(tmp_path / "counting")


def test_blocks_whose_experts_ranks_share_are_not_compiled():
    with pytest.raises(RequestError, match="compile=true with ep 2"):
        estimated({"compile": True, "dp_shard": 2, "ep": 2}, model=str(EXPERTS))


def test_a_framework_computes_as_its_profile_says():
    with pytest.raises(RequestError, match="compile=true with --framework"):
        estimated({"compile": "true"}, framework="nanotron")
