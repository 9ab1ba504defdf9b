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
from planner.checking.check import check_plan
from planner.errors import CodegenError, RequestError

MODEL = Path(__file__).with_name("compiled_mlp.py")


def estimated(fix, *, model=str(MODEL), **options):
    fix = {"microbatch_size": 2, **fix}
    return planner.estimate(
        model, gpus=2, cluster="cpu", dtype="float64", global_batch_size=8, fix=fix, **options
    )


@pytest.mark.run
def test_compiled_blocks_train_as_on_one_process(tmp_path):
    layouts = {
        "zero_3": {"dp_shard": 2, "activation_checkpointing": "full"},
        "pipeline": {"pp": 2, "schedule": "1F1B", "activation_checkpointing": "selective"},
    }
    jobs = []
    for name, fix in layouts.items():
        folder = tmp_path / name
        estimated({"compile": True, **fix}).save(folder)
        assert "compile_blocks(part)" in (folder / "train.py").read_text()
        extra = ("--evaluate-every", "2") if name == "zero_3" else ()
        jobs.append((folder, arguments_of(folder, extra=extra)))
    run_jobs(jobs, num_processes=2)
    first = tmp_path / "zero_3"
    run_jobs([(first, arguments_of(first, name="reference", extra=("--reference",)))])
    expected = outcome_of(first, name="reference")
    for name in layouts:
        found = outcome_of(tmp_path / name)
        assert largest_difference(found.losses, expected.losses) < 1e-8
        assert largest_difference(found.grad_norms, expected.grad_norms) < 1e-8
        assert largest_weight_difference(found.weights, expected.weights) < 1e-8


def test_fewer_kernels_take_less_time_and_memory():
    plain, compiled = (estimated({"compile": compile}) for compile in (False, True))
    assert compiled.best.costs.compute_s < plain.best.costs.compute_s
    assert compiled.best.peak_memory_bytes <= plain.best.peak_memory_bytes


def test_what_is_not_traced_is_refused_before_a_script_is_written(tmp_path):
    result = estimated({"compile": True}, model=f"{MODEL}:build_broken")
    with pytest.raises(CodegenError, match=r"does not trace blocks\.0 in one graph: Unsupported"):
        result.save(tmp_path / "broken")
    assert not (tmp_path / "broken").exists()


def test_split_blocks_are_not_compiled():
    with pytest.raises(RequestError, match="compile=true with tp 2"):
        estimated({"compile": True, "tp": 2})


def test_a_framework_computes_as_its_profile_says():
    with pytest.raises(RequestError, match="compile=true with --framework"):
        estimated({"compile": "true"}, framework="nanotron")


def test_compiled_blocks_are_not_run_without_data(tmp_path):
    estimated({"compile": True}).save(tmp_path / "plan")
    with pytest.raises(RequestError, match="its blocks are compiled"):
        check_plan(tmp_path / "plan")
