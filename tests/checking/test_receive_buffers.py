"""Memory of stages whose blocks read their input once, in another dtype, against the script's.

Nothing keeps that input but a checkpoint, for which it lies in the receive buffer of its stage.
"""

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
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x):
        y = functional.layer_norm(x.float(), (256,)).to(x.dtype) * self.norm.weight
        return x + self.down(functional.gelu(self.up(y)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, 256)
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.head = nn.Linear(256, 64)

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
INTERLEAVED = {"schedule": "Interleaved1F1B", "virtual_stages": 4}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("layout", "most"),
    [(INTERLEAVED, 0.02), ({"schedule": "1F1B"}, 0.035)],
    ids=["interleaved", "1F1B"],
)
def test_what_a_checkpoint_holds_of_them_is_not_counted_again(layout, most, recompute, tmp_path):
    """By 5 to 11%, where ranks hold several stages that recompute."""
    (tmp_path / "model.py").write_text(MODEL, encoding="utf-8")
    fix = {"pp": 2, "microbatch_size": 16, "activation_checkpointing": recompute, **layout}
    planner.plan(
        str(tmp_path / "model.py"),
        gpus=2,
        cluster="h100-sxm",
        dtype="bfloat16",
        global_batch_size=128,
        fix=fix,
    ).save(tmp_path / "plan")
    check = check_plan(tmp_path / "plan")
    assert check.traffic_holds
    assert all(abs(stage.error) <= most for stage in check.stages), [s.error for s in check.stages]
