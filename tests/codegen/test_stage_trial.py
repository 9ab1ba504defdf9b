"""Stages of a plan run the model's code without data before a script is written."""

import pytest

import planner
from planner.errors import CodegenError

MODEL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, left):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.left = left

    def forward(self, x):
        x = self.layer(x).tanh()
        self.left["behind"] = x
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = {}
        self.first = Block(self.left)
        self.blocks = nn.ModuleList(Block({}) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return (x + self.left["behind"]).square().mean()


def build_model():
    return Model()


def example_batch(microbatch_size):
    return torch.randn(microbatch_size, 4), None
"""


def test_code_that_reads_what_another_stage_left_behind_is_refused(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    result = planner.plan(
        str(tmp_path / "model.py"),
        gpus=2,
        cluster="cpu",
        global_batch_size=4,
        fix={"pp": 2, "microbatch_size": 1},
    )
    with pytest.raises(CodegenError, match=r"stage 1 of 2 does not run .* KeyError: 'behind'"):
        result.save(tmp_path / "plan")
