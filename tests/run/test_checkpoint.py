"""Checkpoints of one layout go on in any other, and large models start from --init."""

import json
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from example_plans import SHALLOW_GPT, make_plan
from launch import (
    arguments_of,
    largest_difference,
    largest_weight_difference,
    outcome_of,
    read_weights,
    run,
    run_jobs,
    torchrun,
    write_script,
)

from planner.runtime.model import UserModel, build_model

pytestmark = pytest.mark.run

SAVED = {"tp": 2, "pp": 2, "sequence_parallel": True, "microbatch_size": 8}
RESUMED = {
    "dp_shard_4": {"dp_shard": 4},
    "dp_2_pp_2": {"dp_shard": 2, "pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2},
    "dp_2_tp_2": {"dp_shard": 2, "tp": 2, "microbatch_size": 8},
}
LAYOUTS = {"first": SAVED, **RESUMED, "one_process": SAVED}
LIMIT = 1e-8


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """One script per layout; those of the same processes run in one group.

    The model saves after two steps of one layout, takes two more in others and on one process,
    and starts from written weights. Its projections of queries, keys and values are one tensor,
    of which each rank holds three pieces, and its first and last stage share a weight.
    """
    root = tmp_path_factory.mktemp("checkpoint")
    made = {
        name: write_script(root / name, make_plan(SHALLOW_GPT, **layout))
        for name, layout in LAYOUTS.items()
    }
    write_first_weights(made["first"] / "weights")
    run_jobs(jobs_of(made["first"], alone_from_the_start))
    run_jobs(jobs_of(made["first"], first_steps), num_processes=4)
    for name, folder in made.items():
        if name != "first":
            shutil.copytree(made["first"] / "run", folder / "run")
    resumed = [job for name in RESUMED for job in jobs_of(made[name], more_steps)]
    run_jobs(resumed, num_processes=4)
    run_jobs(jobs_of(made["one_process"], more_steps_alone))
    return made


def write_first_weights(folder):
    """Write what the scripts draw, as others write checkpoints."""
    plan = make_plan(SHALLOW_GPT)
    user = UserModel(file=Path(plan.model.file), factory=plan.model.factory)
    weights = {name: p.detach() for name, p in build_model(user, 0).named_parameters()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(weights, checkpoint_id=folder)


def jobs_of(folder, arguments):
    return [(folder, each) for each in arguments(folder)]


def alone_from_the_start(folder):
    every = ["--reference", "--checkpoint-every", "1"]
    return [
        arguments_of(folder, name="reference", steps=4, extra=every),
        arguments_of(folder, name="init_reference", extra=["--reference"]),
    ]


def first_steps(folder):
    init = ["--init", str(folder / "weights")]
    every = ["--checkpoint-every", "1", "--async-checkpoint"]
    return [
        arguments_of(folder, steps=2, extra=every),
        arguments_of(folder, name="from_init", extra=init),
    ]


def more_steps(folder):
    return [arguments_of(folder, steps=4, extra=["--resume"])]


def more_steps_alone(folder):
    return [arguments_of(folder, steps=4, extra=["--resume", "--reference"])]


@pytest.mark.parametrize("name", [*RESUMED, "one_process"])
def test_resumed_training_ends_where_uninterrupted_training_does(scripts, name):
    expected = outcome_of(scripts["first"], name="reference", steps=4)
    found = outcome_of(scripts[name], steps=4)
    assert [row["step"] for row in found.rows] == [3, 4]
    assert largest_difference(found.losses, expected.losses[2:]) < LIMIT
    assert largest_weight_difference(found.weights, expected.weights) < LIMIT


def test_what_is_written_while_training_goes_on_is_that_of_its_step(scripts):
    found, expected = (
        read_weights(scripts["first"] / name / "step-00000001") for name in ("run", "reference")
    )
    assert largest_weight_difference(found, expected) < LIMIT


def test_weights_read_from_init_train_as_built_ones(scripts):
    expected = outcome_of(scripts["first"], name="init_reference")
    found = outcome_of(scripts["first"], name="from_init")
    assert largest_difference(found.losses, expected.losses) < LIMIT
    assert largest_weight_difference(found.weights, expected.weights) < LIMIT


def test_command_line_saves_and_resumes(tmp_path):
    """The documented commands, from another working directory."""
    folder = write_script(
        tmp_path / "plans" / "run1", make_plan(SHALLOW_GPT, dp_shard=2, dtype="float32")
    )
    script = str(folder / "train.py")
    log, checkpoint = tmp_path / "log.jsonl", tmp_path / "checkpoints"
    options = ["--log-file", str(log), "--checkpoint", str(checkpoint)]
    launcher = [sys.executable, *torchrun(2), script]
    run([*launcher, "--steps", "2", *options], timeout_s=120, cwd=tmp_path)
    run([*launcher, "--steps", "3", *options, "--resume"], timeout_s=120, cwd=tmp_path)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert set(rows[0]) == {
        "step",
        "loss",
        "grad_norm",
        "step_time_s",
        "tokens_per_s",
        "peak_memory_bytes",
        "predicted_step_time_s",
        "predicted_peak_memory_bytes",
        "peak_memory_of",
        "plan",
    }
    reference = tmp_path / "reference.jsonl"
    command = [sys.executable, script, "--reference", "--steps", "3", "--log", str(reference)]
    run(command, timeout_s=120, cwd=tmp_path)
    expected = [json.loads(line)["loss"] for line in reference.read_text().splitlines()]
    assert largest_difference([row["loss"] for row in rows], expected) < 1e-5


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path):
    """Files cannot grow beyond a limit, which ends the save with a message."""
    folder = write_script(tmp_path / "plan", make_plan(SHALLOW_GPT, dtype="float32"))
    log, checkpoints = tmp_path / "log.jsonl", tmp_path / "checkpoints"
    command = [sys.executable, str(folder / "train.py"), "--resume"]
    command += ["--checkpoint", str(checkpoints), "--log-file", str(log)]
    run([*command, "--steps", "2"], timeout_s=120)
    limited = shlex.join([*command, "--steps", "3"])
    full = subprocess.run(
        ["bash", "-c", f"ulimit -f 64; {limited}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert full.returncode != 0
    assert full.stderr.count("cannot be written") == 1
    assert [each.name for each in checkpoints.glob("step-*")] == ["step-00000002"]
    run([*command, "--steps", "3"], timeout_s=120)
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 2, 3, 3]
    assert (checkpoints / "step-00000003").is_dir()
