"""Memory of a rank with several stages, of which one keeps much and another takes much for a while.

They do not at once: a stage at the end of the model runs its backward as soon as its forward ends.
"""

import planner
from planner.checking.check import check_plan

MODEL = """
import torch
from torch import nn
from torch.nn import functional


class Brief(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 8192)

    def forward(self, x):
        return x + self.up(x).mean(-1, keepdim=True)


class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 1024), nn.Linear(1024, 64)

    def forward(self, x):
        y = self.up(x)
        for _ in range(4):
            y = functional.gelu(y)
        return x + self.down(y)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, 64)
        self.blocks = nn.ModuleList([Brief(), Brief(), Brief(), Keeping()])
        self.head = nn.Linear(64, 64)

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build_model():
    return Model()


def example_batch(batch_size):
    tokens = torch.randint(64, (batch_size, 513))
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(logits, targets):
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


def test_what_one_stage_takes_is_not_added_to_what_another_keeps(tmp_path):
    """By 49% too much of the second rank, where they are."""
    (tmp_path / "model.py").write_text(MODEL, encoding="utf-8")
    planner.plan(
        str(tmp_path / "model.py"),
        gpus=2,
        cluster="h100-sxm",
        dtype="float32",
        global_batch_size=64,
        fix={
            "pp": 2,
            "schedule": "Interleaved1F1B",
            "virtual_stages": 2,
            "microbatch_size": 8,
            "activation_checkpointing": "none",
        },
    ).save(tmp_path / "plan")
    check = check_plan(tmp_path / "plan")
    assert all(abs(stage.error) <= 0.02 for stage in check.stages), [s.error for s in check.stages]
