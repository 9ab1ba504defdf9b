"""Checkpoints of one layout go on in any other, and large models start from --init."""

import json
import shutil
import sys

import pytest
from example_plans import GPT, LLAMA, make_plan
from launch import (
    arguments_of,
    largest_difference,
    largest_weight_difference,
    outcome_of,
    run,
    run_jobs,
    torchrun,
    write_script,
)

pytestmark = pytest.mark.run

SAVED = {"tp": 2, "pp": 2, "sequence_parallel": True, "microbatch_size": 8}
RESUMED = {
    "dp_shard_4": {"dp_shard": 4},
    "pp_4": {"pp": 4, "schedule": "Interleaved1F1B", "virtual_stages": 2},
    "dp_2_tp_2": {"dp_shard": 2, "tp": 2, "microbatch_size": 8},
}
LIMIT = 1e-8


@pytest.fixture(scope="module", params=[GPT, LLAMA], ids=lambda case: case.name)
def runs(request, tmp_path_factory):
    """Save after two steps of one layout, take two more in others and on one process."""
    root, case = tmp_path_factory.mktemp("checkpoint"), request.param
    first = write_script(root / "first", make_plan(case, **SAVED))
    run_jobs([(first, arguments_of(first, steps=2))], root / "first.json", num_processes=4)
    more = {}
    for name in (*RESUMED, "one_process"):
        layout = RESUMED.get(name, SAVED)
        more[name] = write_script(root / name, make_plan(case, **layout))
        shutil.copytree(first / "run", more[name] / "run")
    on_many = [
        (more[name], arguments_of(more[name], steps=4, extra=["--resume"])) for name in RESUMED
    ]
    run_jobs(on_many, root / "more.json", num_processes=4)
    alone = more["one_process"]
    jobs = [
        (alone, arguments_of(alone, steps=4, extra=["--resume", "--reference"])),
        (first, arguments_of(first, name="reference", steps=4, extra=["--reference"])),
    ]
    run_jobs(jobs, root / "alone.json")
    return outcome_of(first, name="reference", steps=4), more


@pytest.mark.parametrize("name", [*RESUMED, "one_process"])
def test_resumed_training_ends_where_uninterrupted_training_does(runs, name):
    expected, folders = runs
    found = outcome_of(folders[name], steps=4)
    assert [row["step"] for row in found.rows] == [3, 4]
    assert largest_difference(found.losses, expected.losses[2:]) < LIMIT
    assert largest_weight_difference(found.weights, expected.weights) < LIMIT


@pytest.mark.parametrize("case", [GPT, LLAMA], ids=lambda case: case.name)
def test_weights_read_from_init_train_as_built_ones(tmp_path, case):
    layout = {"pp": 2, "tp": 2, "microbatch_size": 8, "sequence_parallel": True}
    folder = write_script(tmp_path / "run", make_plan(case, **layout))
    init = str(tmp_path / "init")
    reference = arguments_of(folder, name="reference", extra=["--reference"])
    run_jobs([(folder, ["--write-init", init]), (folder, reference)], tmp_path / "alone.json")
    from_init = arguments_of(folder, extra=["--init", init])
    run_jobs([(folder, from_init)], tmp_path / "jobs.json", num_processes=4)
    expected, found = outcome_of(folder, name="reference"), outcome_of(folder)
    assert largest_difference(found.losses, expected.losses) < LIMIT
    assert largest_weight_difference(found.weights, expected.weights) < LIMIT


def test_command_line_saves_and_resumes(tmp_path):
    """The documented commands, from another working directory."""
    folder = write_script(tmp_path / "plans" / "run1", make_plan(GPT, dp_shard=2, dtype="float32"))
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
    }
    reference = tmp_path / "reference.jsonl"
    command = [sys.executable, script, "--reference", "--steps", "3", "--log", str(reference)]
    run(command, timeout_s=120, cwd=tmp_path)
    expected = [json.loads(line)["loss"] for line in reference.read_text().splitlines()]
    assert largest_difference([row["loss"] for row in rows], expected) < 1e-5
