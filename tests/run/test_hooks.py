"""The model file's own data, optimiser, schedule and evaluation, alike in every layout."""

import json
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
    """Five steps on one process and in two layouts, one of which goes on from a third's two."""
    root = tmp_path_factory.mktemp("hooks")
    made = {
        name: write_script(root / name, make_plan(HOOKED, **layout))
        for name, layout in LAYOUTS.items()
    }
    last = made["resumed"]
    extra = ["--evaluate-every", "2", "--checkpoint-every", "2"]
    whole = arguments_of(last, name="reference", steps=STEPS, extra=extra)
    run_jobs([(last, [*whole, "--reference"])])
    first_two = ["--log", str(made["tp_pp"] / "run.jsonl"), "--checkpoint", str(last / "run")]
    jobs = [
        (made["tp_pp"], ["--steps", "2", *first_two, *extra]),
        (last, arguments_of(last, steps=STEPS, extra=[*extra, "--resume"])),
        (made["interleaved"], arguments_of(made["interleaved"], steps=STEPS, extra=extra)),
    ]
    run_jobs(jobs, num_processes=4)
    return made


def rows_of(folder, name="run"):
    lines = (folder / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def values_of(rows, name):
    return {row["step"]: row[name] for row in rows if name in row}


TAKEN = {"tp_pp": (1, 2), "interleaved": (1, 2, 3, 4, 5), "resumed": (3, 4, 5)}
EVALUATED = (2, 4, 5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_hooks_train_as_on_one_process(folders, name):
    expected, found = rows_of(folders["resumed"], "reference"), rows_of(folders[name])
    for kind in ("loss", "grad_norm", "validation_loss", "factor"):
        one, many = values_of(expected, kind), values_of(found, kind)
        reported = range(1, 6) if kind in ("loss", "grad_norm") else EVALUATED
        assert list(one) == list(reported)
        assert list(many) == [step for step in TAKEN[name] if step in reported]
        assert largest_difference(list(many.values()), [one[step] for step in many]) < LIMIT


@pytest.mark.parametrize("name", ["interleaved", "resumed"])
def test_hooks_end_in_the_weights_of_one_process(folders, name):
    expected = read_weights(folders["resumed"] / "reference" / "step-00000005")
    found = read_weights(folders[name] / "run" / "step-00000005")
    assert largest_weight_difference(found, expected) < LIMIT
