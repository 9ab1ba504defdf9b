"""Where training starts: drawn shard by shard, read from files, or resumed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from example_plans import SHALLOW_GPT, SHALLOW_LLAMA, make_plan
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
from safetensors.torch import save_file

from planner.runtime.model import UserModel, build_model

pytestmark = pytest.mark.run

LIMIT = 1e-8
LAYOUTS = {
    "gpt_tp": (SHALLOW_GPT, {"tp": 2, "sequence_parallel": True, "microbatch_size": 8}),
    "gpt_pp": (SHALLOW_GPT, {"pp": 2, "microbatch_size": 8}),
    "llama_dp": (SHALLOW_LLAMA, {"dp_shard": 2}),
}


def write_large(folder, plan):
    """Write a script that takes every tensor for too large to be kept."""
    write_script(folder, plan)
    path = folder / "runtime" / "first_weights.py"
    old, text = "SMALLEST_DEFERRED = 2**16", path.read_text()
    assert old in text
    path.write_text(text.replace(old, "SMALLEST_DEFERRED = 100"))
    return folder


def write_safetensors(case, folder, *, num_files=2, **changes):
    """Write the first weights of a seed that is not the script's, as Hugging Face does."""
    user = UserModel(file=case.file, factory=factory_of(case))
    model = build_model(user, 5).double()
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    weights |= changes
    weights = {name: value for name, value in weights.items() if value is not None}
    folder.mkdir(parents=True)
    names = list(weights)
    files = [f"model-{i + 1:05d}-of-{num_files:05d}.safetensors" for i in range(num_files)]
    for index, file in enumerate(files):
        save_file({name: weights[name] for name in names[index::num_files]}, folder / file)
    index = {name: files[i % num_files] for i, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def factory_of(case):
    return make_plan(case).model.factory


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    root = tmp_path_factory.mktemp("start")
    made, together, alone = {}, [], []
    for name, (case, layout) in LAYOUTS.items():
        folder = made[name] = write_large(
            root / name, make_plan(case, num_parameters=2 * 10**9, **layout)
        )
        init = ["--init", str(write_safetensors(case, folder / "hf"))]
        alone += [
            (folder, arguments_of(folder, name="reference", extra=["--reference"])),
            (folder, arguments_of(folder, name="init_reference", extra=["--reference", *init])),
        ]
        together += [
            (folder, arguments_of(folder, name="drawn")),
            (folder, arguments_of(folder, name="from_init", extra=init)),
        ]
    run_jobs(alone)
    run_jobs(together, num_processes=2)
    return made


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
    ("found", "expected"), [("drawn", "reference"), ("from_init", "init_reference")]
)
def test_shards_start_as_one_process_does(scripts, name, found, expected):
    one, many = (outcome_of(scripts[name], name=each) for each in (expected, found))
    assert largest_difference(many.losses, one.losses) < LIMIT
    assert largest_difference(many.grad_norms, one.grad_norms) < LIMIT
    assert largest_weight_difference(many.weights, one.weights) < LIMIT


def test_read_weights_are_others_than_drawn_ones(scripts):
    drawn, read = (outcome_of(scripts["gpt_tp"], name=n) for n in ("reference", "init_reference"))
    assert largest_difference(drawn.losses, read.losses) > 1e-4


def launch(folder, *arguments, processes=2):
    command = [sys.executable, *torchrun(processes), str(folder / "train.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_bad_input_is_told_once(scripts, tmp_path):
    folder = scripts["gpt_pp"]
    wrong = {
        "transformer.ln_f.weight": torch.zeros(3),
        "transformer.ln_f.bias": None,
        "extra": torch.zeros(2),
    }
    init = write_safetensors(SHALLOW_GPT, tmp_path / "wrong", **wrong)
    done = launch(folder, "--init", str(init))
    assert done.returncode != 0
    assert done.stderr.count("does not fit the model") == 1
    assert "missing: transformer.ln_f.bias\n" in done.stderr
    assert "unexpected: extra\n" in done.stderr
    assert "of another shape: transformer.ln_f.weight (3,) instead of (64,)" in done.stderr
    assert 'Traceback (most recent call last):\n  File "' + str(folder) not in done.stderr
    assert done.stderr.count("--nproc-per-node") == 0


def test_a_wrong_number_of_processes_is_told_once(scripts):
    done = launch(scripts["gpt_pp"], processes=3)
    assert done.returncode != 0
    assert done.stderr.count("this plan is for 2 processes, but 3 were started") == 1


def test_a_request_to_stop_saves_and_leaves_with_the_code_to_go_on(tmp_path):
    """Without a checkpoint --resume starts; a cut-short one is passed over; K are kept."""
    folder = write_script(tmp_path / "one", make_plan(SHALLOW_GPT, dtype="float32"))
    checkpoints, log = tmp_path / "checkpoints", tmp_path / "log.jsonl"
    command = [sys.executable, str(folder / "train.py"), "--checkpoint", str(checkpoints)]
    command += ["--log", str(log), "--resume", "--checkpoint-every", "2"]
    command += ["--keep-checkpoints", "2"]
    process = subprocess.Popen([*command, "--steps", "100000"], stdout=subprocess.PIPE, text=True)
    while not log.exists() or log.read_text().count("\n") < 7:
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "holds no whole checkpoint: training starts at step 0" in out
    last = json.loads(log.read_text().splitlines()[-1])["step"]
    assert f"asked to stop: ended after step {last}, saved" in out
    saved = sorted(path.name for path in checkpoints.glob("step-*"))
    assert len(saved) == 2
    assert (checkpoints / "stopped").exists()
    assert saved[-1] == f"step-{last:08d}"
    shutil.copytree(checkpoints / saved[-1], checkpoints / f".step-{last + 1:08d}.draft")
    cut = checkpoints / f"step-{last + 1:08d}"
    shutil.copytree(checkpoints / saved[-1], cut)
    file = next(cut.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    out = run([*command, "--steps", str(last + 1)], timeout_s=60).stdout
    assert f"{cut} is not whole ({file.name} is cut short): passed over" in out
    assert f"step {last + 1}: loss" in out
    assert f"step {last}: loss" not in out
