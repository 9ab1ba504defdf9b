"""Memory of models that are mostly a table: its gradients decide, and how they are reduced."""

from itertools import product

import pytest

import planner
from planner.checking.check import check_plan

MODEL = """
import torch
from torch import nn
from torch.nn import functional

ROWS, CLASSES, WIDTH = 20000, {classes}, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        if CLASSES == ROWS:
            self.head.weight = self.table.weight

    def forward(self, x):
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build_model():
    return Model()


def example_batch(size):
    return torch.randint(0, ROWS, (size, 32)), torch.randint(0, CLASSES, (size, 32))


def loss_fn(output, targets):
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())
"""

LAYOUTS = {
    "one": {},
    "pipeline": {"pp": 2, "schedule": "1F1B"},
    "sharded": {"dp_shard": 2, "reshard_after_forward": False},
    "resharded": {"dp_shard": 2, "reshard_after_forward": True},
    "both": {"pp": 2, "dp_shard": 2, "schedule": "GPipe"},
}


GRID = [*product(LAYOUTS, ("float32", "bfloat16"), (1, 4), (False, True))]


def cases():
    """All but pipelines of one microbatch; half are enough for each three values to meet."""
    for layout, dtype, microbatches, is_tied in GRID:
        if "pp" in LAYOUTS[layout] and microbatches == 1:
            continue
        odd = [*LAYOUTS].index(layout) + (dtype == "float32") + (microbatches == 1) + is_tied
        marks = pytest.mark.bench if odd % 2 else ()
        yield pytest.param(layout, dtype, microbatches, is_tied, marks=marks)


@pytest.mark.parametrize(("layout", "dtype", "microbatches", "is_tied"), [*cases()])
def test_tables_take_the_memory_that_is_planned(tmp_path, layout, dtype, microbatches, is_tied):
    fix = LAYOUTS[layout]
    (tmp_path / "table.py").write_text(MODEL.format(classes=20000 if is_tied else 128))
    gpus = fix.get("pp", 1) * fix.get("dp_shard", 1)
    planner.estimate(
        str(tmp_path / "table.py"),
        gpus=gpus,
        cluster="cpu",
        dtype=dtype,
        global_batch_size=2 * microbatches * fix.get("dp_shard", 1),
        fix={**fix, "microbatch_size": 2, "activation_checkpointing": "none"},
    ).save(tmp_path / "plan")
    check = check_plan(tmp_path / "plan")
    assert check.traffic_holds
    for stage in check.stages:
        assert abs(stage.error) <= 0.05, stage
