"""Stages of a plan run the model's code without data before a script is written."""

import sys

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


BLOCKS = """
from torch import nn


def blocks():
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(NUMBER)))
"""

CHAIN = """
import torch
from blocks_of_it import blocks


def build_model():
    return blocks()


def example_batch(microbatch_size):
    return torch.randn(microbatch_size, 4), torch.randn(microbatch_size, 4)


def loss_fn(output, targets):
    return (output - targets).square().mean()
"""


def test_stages_of_one_model_leave_no_module_to_the_next(tmp_path):
    before, numbers = list(sys.path), []
    for number in (4, 6):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "chain.py").write_text(CHAIN)
        (folder / "blocks_of_it.py").write_text(BLOCKS.replace("NUMBER", str(number)))
        result = planner.plan(
            str(folder / "chain.py"), gpus=2, cluster="cpu", global_batch_size=4, fix={"pp": 2}
        )
        result.save(folder / "plan")
        numbers.append(len({name.partition(".")[0] for name in result.best.units[1:-1]}))
    assert numbers == [4, 6]
    assert sys.path == before
    assert not {"blocks_of_it", "chain", "user_model_chain"} & sys.modules.keys()
