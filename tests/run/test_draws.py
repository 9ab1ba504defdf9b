"""What a step draws is the same in all layouts, where ranks must agree and where they recompute."""

import sys
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

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
from families import fast_links

pytestmark = pytest.mark.run

MODEL = Path(__file__).with_name("masked_frames.py")
DRAWING_BLOCKS = f"""
import sys
sys.path.insert(0, {str(MODEL.parent)!r})
from masked_frames import Block, Model, example_batch, loss_fn


def build_model():
    return Model(Block)
"""

STAGED = {"pp": 2, "microbatch_size": 2}
LAYOUTS = {
    "1f1b": (2, {**STAGED, "schedule": "1F1B"}),
    "interleaved": (2, {**STAGED, "schedule": "Interleaved1F1B"}),
    "zbv": (2, {**STAGED, "schedule": "ZBVZeroBubble"}),
    "staged_dp": (4, {**STAGED, "dp_shard": 2}),
    "dp": (2, {"dp_shard": 2, "microbatch_size": 2}),
}
"""By name: processes, and what is fixed."""


def planned(model, gpus, fix, **request):
    request = {"cluster": "cpu", "dtype": "float64", **request}
    return planner.plan(str(model), gpus=gpus, global_batch_size=16, fix=fix, **request)


def trained(result, folder, gpus):
    """Return what its script makes of the model, and what one process does."""
    result.save(folder)
    run_jobs([(folder, arguments_of(folder, name="reference", extra=("--reference",)))])
    run_jobs([(folder, arguments_of(folder))], num_processes=gpus)
    return outcome_of(folder), outcome_of(folder, name="reference")


def check(model, folder, gpus, fix):
    result = planned(model, gpus, fix)
    found, expected = trained(result, folder, gpus)
    assert largest_difference(found.losses, expected.losses) < 1e-8
    assert largest_weight_difference(found.weights, expected.weights) < 1e-8
    assert result.best.num_microbatches > 1


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_stages_and_ranks_draw_the_masks_of_one_process(name, tmp_path):
    gpus, fix = LAYOUTS[name]
    check(MODEL, tmp_path, gpus, fix)


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_a_block_that_runs_again_draws_what_it_drew(kind, tmp_path):
    model = tmp_path / "model.py"
    model.write_text(DRAWING_BLOCKS)
    fix = {"dp_shard": 2, "microbatch_size": 2, "activation_checkpointing": kind}
    check(model, tmp_path / "out", 2, fix)


NOISY = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        y = self.up(x)
        INSIDE
        y = self.down(y.tanh())
        BEHIND
        return x + y


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return (x * torch.rand(16, device=x.device)).square().mean()


def build_model():
    return Model()


def example_batch(microbatch_size):
    return torch.randint(0, 32, (microbatch_size, 8)), None
"""
INSIDE = "y = torch.native_dropout(y, 0.5, True)[0]"
BEHIND = "y = y + torch.randn_like(y)"


def noisy(folder, inside="", behind=""):
    model = folder / "model.py"
    model.write_text(NOISY.replace("INSIDE", inside).replace("BEHIND", behind))
    return model


@pytest.mark.parametrize(
    ("inside", "behind", "fix", "differs"),
    [
        (INSIDE, "", {"tp": 2}, "each rank of tp draws for its own part"),
        ("", BEHIND, {"tp": 2}, ""),
        ("", BEHIND, {"pp": 2}, "stages do not draw what"),
        ("", "", {"pp": 2}, ""),
        (INSIDE, BEHIND, {"dp_shard": 2}, ""),
    ],
)
def test_draws_that_differ_from_those_of_one_process_are_told(
    inside, behind, fix, differs, tmp_path
):
    result = planned(noisy(tmp_path, inside, behind), 2, fix, cluster=fast_links(tmp_path))
    warned = [warning for warning in result.warnings if "random numbers" in warning]
    assert len(warned) == bool(differs)
    assert all(differs in warning and "model.py:1" in warning for warning in warned)
    found, expected = trained(result, tmp_path / "out", 2)
    assert (largest_difference(found.losses, expected.losses) > 1e-8) == bool(differs)


def test_on_gpus_stages_draw_by_seeds_of_their_own(tmp_path):
    model = noisy(tmp_path)
    cluster = {"cluster": "h100-sxm", "dtype": "bfloat16"}
    (warning,) = planned(model, 2, {"pp": 2}, **cluster).warnings
    assert "model.py:29 (`return (x * torch.rand" in warning
    assert planned(model, 2, {"tp": 2}, **cluster).warnings == ()
