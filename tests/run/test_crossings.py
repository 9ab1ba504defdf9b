"""Stages that hand over more than one tensor, or one without gradient, train as one process."""

import pytest
from crossing_models import DIT, LORA, T5, TUPLES, UNET
from example_plans import make_plan
from launch import (
    arguments_of,
    largest_difference,
    largest_weight_difference,
    outcome_of,
    run_jobs,
    write_script,
)

pytestmark = pytest.mark.run

INTERLEAVED = {"schedule": "Interleaved1F1B", "virtual_stages": 2}
KEEP = {"reshard_after_forward": False}
CASES = {
    # Cuts on the way down, in the middle and on the way up.
    "unet-pp_4": (UNET, {"pp": 4, "cuts": (3, 7, 11)}),
    "unet-interleaved": (
        UNET,
        {"pp": 2, "dp_shard": 2, "cuts": (1, 6, 10), "recompute": "full", **INTERLEAVED},
    ),
    "t5-pp_4": (
        T5,
        {
            "pp": 4,
            "cuts": (2, 4, 6),
            "recompute": ("none", "full", "selective", "full", "selective", "none"),
        },
    ),
    "t5-lone_ends": (T5, {"pp": 4, "cuts": (1, 5, 7), "schedule": "GPipe", **KEEP}),
    "dit-tp_2": (DIT, {"pp": 2, "tp": 2, "recompute": "selective"}),
    "dit-lone_ends": (DIT, {"pp": 4, "cuts": (1, 3, 5), "recompute": "full"}),
    "tuples-pp_4": (TUPLES, {"pp": 4, "cuts": (2, 4, 5), "recompute": "full"}),
    "tuples-dp_2": (
        TUPLES,
        {"pp": 2, "dp_shard": 2, "schedule": "GPipe", "recompute": "selective", **KEEP},
    ),
    "lora-frozen_stage": (LORA, {"pp": 4, "cuts": (1, 3, 5), "recompute": "full"}),
    "lora-dp_2": (LORA, {"pp": 2, "dp_shard": 2, "cuts": (1,), **KEEP}),
    "lora-interleaved": (LORA, {"pp": 2, "dp_shard": 2, "cuts": (1, 3, 4), **INTERLEAVED}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Run all cases in one process group."""
    root = tmp_path_factory.mktemp("crossings")
    jobs, references = [], {}
    for name, (model, layout) in CASES.items():
        folder = write_script(root / name, make_plan(model, global_batch_size=8, **layout))
        jobs.append((folder, arguments_of(folder)))
        arguments = arguments_of(folder, name="reference", extra=("--reference",))
        references.setdefault(model.name, (folder, arguments))
    run_jobs(list(references.values()))
    run_jobs(jobs, num_processes=4)
    return root, {name: folder for name, (folder, _) in references.items()}


@pytest.mark.parametrize("name", CASES)
def test_stages_train_as_one_process(folders, name):
    root, references = folders
    expected = outcome_of(references[CASES[name][0].name], name="reference")
    found = outcome_of(root / name)
    assert largest_difference(found.losses, expected.losses) < 1e-8
    assert largest_difference(found.grad_norms, expected.grad_norms) < 1e-8
    assert largest_weight_difference(found.weights, expected.weights) < 1e-8
