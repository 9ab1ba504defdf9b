"""Scripts whose mesh has another order train as one process does, and go on in any other."""

import pytest
import torch.distributed as dist
from example_plans import SHALLOW_GPT, SHALLOW_LLAMA, make_plan
from launch import (
    arguments_of,
    largest_difference,
    largest_weight_difference,
    outcome_of,
    read_weights,
    run_jobs,
    write_script,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from planner.runtime.context_mesh import merged_mesh, state_mesh
from planner.runtime.expert_mesh import expert_mesh
from planner.runtime.mesh_order import device_mesh
from planner.vocabulary import MESH_ORDER

pytestmark = pytest.mark.run

STEPS, MORE_STEPS = 3, 5

CASES = {
    "pp inside dp_shard": (
        SHALLOW_GPT,
        {"dp_shard": 2, "pp": 2},
        ("dp_replicate", "dp_shard", "cp", "pp", "tp"),
    ),
    "dp_shard around dp_replicate": (
        SHALLOW_LLAMA,
        {"dp_shard": 2, "dp_replicate": 2},
        ("pp", "dp_shard", "dp_replicate", "cp", "tp"),
    ),
    "pp inside dp_shard around tp": (
        SHALLOW_LLAMA,
        {"dp_shard": 2, "pp": 2, "tp": 2, "sequence_parallel": True},
        ("dp_replicate", "dp_shard", "cp", "pp", "tp"),
    ),
    "tp around all": (
        SHALLOW_GPT,
        {"tp": 2, "dp_replicate": 2, "pp": 2},
        ("tp", "dp_replicate", "dp_shard", "cp", "pp"),
    ),
}
"""Model, layout and order."""


def plan_of(name, **changes):
    model, layout, order = CASES[name]
    return make_plan(model, **{"microbatch_size": 2, "mesh_order": order, **layout, **changes})


def processes_of(plan):
    return plan.degrees.world_size


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Run all cases, then one of them further in the usual order and one in a third one."""
    root = tmp_path_factory.mktemp("orders")
    extra = ("--dtype", "float64")
    jobs, references = {}, {}
    for name in CASES:
        plan = plan_of(name)
        folder = write_script(root / name, plan)
        run = (folder, arguments_of(folder, steps=STEPS, extra=extra))
        jobs.setdefault(processes_of(plan), []).append(run)
        references.setdefault(CASES[name][0].name, folder)
    for folder in references.values():
        alone = (*extra, "--reference")
        steps = {"reference": STEPS, "longer": MORE_STEPS}
        run_jobs([
            (folder, arguments_of(folder, name=each, steps=number, extra=alone))
            for each, number in steps.items()
        ])  # fmt: skip
    first = root / "pp inside dp_shard"
    usual = write_script(root / "usual", plan_of(first.name, mesh_order=MESH_ORDER))
    further = ["--steps", str(MORE_STEPS), "--log", str(usual / "run.jsonl")]
    further += ["--checkpoint", str(first / "run"), "--resume", *extra]
    jobs[4].append((usual, further))
    for num_processes, listed in jobs.items():
        run_jobs(listed, num_processes=num_processes)
    return root, references


@pytest.mark.parametrize("name", CASES)
def test_an_order_trains_as_one_process(folders, name):
    root, references = folders
    expected = outcome_of(references[CASES[name][0].name], name="reference", steps=STEPS)
    found = outcome_of(root / name, steps=STEPS)
    assert largest_difference(found.losses, expected.losses) < 1e-8
    assert largest_difference(found.grad_norms, expected.grad_norms) < 1e-8
    assert largest_weight_difference(found.weights, expected.weights) < 1e-8
    assert "mesh = device_mesh(device.type, MESH)" in (root / name / "train.py").read_text()


def test_a_checkpoint_goes_on_in_another_order(folders):
    root, references = folders
    expected = outcome_of(references[SHALLOW_GPT.name], name="longer", steps=MORE_STEPS)
    weights = read_weights(root / "pp inside dp_shard" / "run" / f"step-{MORE_STEPS:08d}")
    assert largest_weight_difference(weights, expected.weights) < 1e-8


@pytest.fixture
def rank_5_of_8():
    """One rank of eight that do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    yield
    dist.destroy_process_group()


def ranks_of(mesh):
    return dist.get_process_group_ranks(mesh.get_group())


@pytest.mark.usefixtures("rank_5_of_8")
def test_ranks_lie_in_the_order_of_the_axes():
    mesh = device_mesh("cpu", {"dp_shard": 2, "tp": 2, "pp": 2})
    assert mesh.mesh_dim_names == ("pp", "dp_shard", "tp")
    assert ranks_of(mesh["pp"]) == [4, 5]
    assert ranks_of(mesh["tp"]) == [5, 7]
    assert ranks_of(mesh["dp_shard"]) == [1, 5]


@pytest.mark.usefixtures("rank_5_of_8")
def test_meshes_of_the_state_and_of_experts_keep_the_order():
    shards = state_mesh(
        merged_mesh(device_mesh("cpu", {"cp": 2, "dp_replicate": 2, "dp_shard": 2}))
    )
    assert shards.mesh_dim_names == ("dp_replicate", "dp_shard_cp")
    assert shards["dp_shard_cp"].mesh.tolist() == [0, 1, 4, 5]
    assert shards["dp_replicate"].mesh.tolist() == [5, 7]
    experts = expert_mesh(device_mesh("cpu", {"dp_shard": 4, "pp": 2}), 2)
    assert ranks_of(experts["ep"]) == [5, 7]
    assert ranks_of(experts["dp_shard_mod_ep"]) == [1, 5]
    assert ranks_of(experts["pp"]) == [4, 5]
    experts = expert_mesh(device_mesh("cpu", {"dp_shard": 2, "tp": 2, "cp": 2}), 4)
    assert ranks_of(experts["ep"]) == [4, 5, 6, 7]
    assert ranks_of(experts["dp_shard_mod_ep"]) == [1, 5]
