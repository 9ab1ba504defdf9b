"""The model file's own data, optimiser, schedule and evaluation, alike in every layout."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from example_plans import SHALLOW_GPT, make_plan
from launch import (
    arguments_of,
    largest_difference,
    largest_weight_difference,
    read_weights,
    run_jobs,
    write_script,
)

pytestmark = pytest.mark.run

HOOKED = replace(SHALLOW_GPT, name="hooked_gpt", file=Path(__file__).with_name("hooked_gpt.py"))
LAYOUTS = {
    "tp_pp": {"tp": 2, "pp": 2, "sequence_parallel": True},
    "interleaved": {"dp_shard": 2, "pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2},
    "resumed": {"dp_shard": 4},
}
STEPS = 5
LIMIT = 1e-8


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Five steps on one process and in two layouts; four ranks go on from the second step."""
    root = tmp_path_factory.mktemp("hooks")
    made = {
        name: write_script(root / name, make_plan(HOOKED, **layout))
        for name, layout in LAYOUTS.items()
    }
    extra = ["--evaluate-every", "2", "--checkpoint-every", "2"]
    whole = arguments_of(made["resumed"], name="reference", steps=STEPS, extra=extra)
    run_jobs([(made["resumed"], [*whole, "--reference"])])
    names = ("tp_pp", "interleaved")
    jobs = [(made[name], arguments_of(made[name], steps=STEPS, extra=extra)) for name in names]
    run_jobs(jobs, num_processes=4)
    shutil.copytree(made["tp_pp"] / "run" / "step-00000002", made["resumed"] / "run/step-00000002")
    resume = arguments_of(made["resumed"], steps=STEPS, extra=[*extra, "--resume"])
    run_jobs([(made["resumed"], resume)], num_processes=4)
    return made


def rows_of(folder, name="run"):
    lines = (folder / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def values_of(rows, name):
    return {row["step"]: row[name] for row in rows if name in row}


@pytest.mark.parametrize("name", LAYOUTS)
def test_hooks_train_as_on_one_process(folders, name):
    expected, found = rows_of(folders["resumed"], "reference"), rows_of(folders[name])
    first = 3 if name == "resumed" else 1
    for kind, steps in (
        *(("loss", range(first, 6)), ("grad_norm", range(first, 6))),
        *(("validation_loss", [2, 4, 5]), ("factor", [2, 4, 5])),
    ):
        one, many = values_of(expected, kind), values_of(found, kind)
        assert list(one) == (list(range(1, 6)) if kind in ("loss", "grad_norm") else [2, 4, 5])
        steps = [step for step in steps if step >= first]
        assert list(many) == steps
        assert largest_difference([many[s] for s in steps], [one[s] for s in steps]) < LIMIT
    folder = folders[name] / "run" / "step-00000005"
    weights = read_weights(folders["resumed"] / "reference" / "step-00000005")
    assert largest_weight_difference(read_weights(folder), weights) < LIMIT
