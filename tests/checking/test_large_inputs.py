"""Inputs that are large beside a model: a rank has those of the microbatches that it holds."""

import pytest

import planner
from planner.checking.check import check_plan

MODEL = """
import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 16, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.head = nn.Linear(64, 10)

    def forward(self, image):
        x = self.patches(image).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def build_model():
    return Model()


def example_batch(size):
    return torch.randn(size, 3, 128, 128), torch.randint(0, 10, (size,))


def loss_fn(output, targets):
    return functional.cross_entropy(output, targets)
"""

LAYOUTS = {
    "one": {},
    "1F1B": {"pp": 2, "schedule": "1F1B"},
    "GPipe": {"pp": 2, "schedule": "GPipe"},
    "sharded": {"dp_shard": 2, "reshard_after_forward": False},
}


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=pytest.mark.bench if name == "GPipe" else ()) for name in LAYOUTS],
)
@pytest.mark.parametrize("microbatches", [pytest.param(2, marks=pytest.mark.bench), 8])
def test_a_rank_holds_the_inputs_that_it_computes_on(tmp_path, layout, microbatches):
    fix = LAYOUTS[layout]
    (tmp_path / "images.py").write_text(MODEL)
    planner.estimate(
        str(tmp_path / "images.py"),
        gpus=fix.get("pp", 1) * fix.get("dp_shard", 1),
        cluster="cpu",
        dtype="bfloat16",
        global_batch_size=4 * microbatches * fix.get("dp_shard", 1),
        fix={**fix, "microbatch_size": 4, "activation_checkpointing": "none"},
    ).save(tmp_path / "plan")
    # Ranks behind the first have a microbatch's inputs for its forward alone, which is not counted.
    first = check_plan(tmp_path / "plan").stages[0]
    assert abs(first.error) <= 0.05, first
