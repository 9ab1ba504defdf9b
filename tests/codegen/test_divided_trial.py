"""Stages whose backward torch does not divide are refused; what it divides trains."""

import pytest

import planner
from planner.checking.check import check_plan
from planner.errors import CodegenError

HEAD = """
import torch
from torch import nn
from torch.nn import functional

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.mix = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x):
{layer}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.other = nn.Embedding(32, 16), nn.Embedding(32, 16)
        self.first = nn.ModuleList(Layer() for _ in range(3))
        self.second = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.first:
            x = layer(x)
{between}
        for layer in self.second:
            y = layer(y)
        return {output}

def build_model():
    return Model()

def example_batch(microbatch_size):
    tokens = torch.randint(32, (microbatch_size, 8))
    return tokens, tokens

def loss_fn(output, targets):
    return functional.mse_loss(output.sum(-1), targets.to(output.dtype))
"""
ONCE = "        return x + self.scale * self.down(self.up(x).relu())"
TWICE = """        x = x + self.scale * self.mix(x.mT).mT
        return x + self.scale * self.down(self.up(x).relu())"""


def planned(tmp_path, *, layer, between, output, schedule):
    text = HEAD.format(layer=layer, between=f"        {between}", output=output)
    (tmp_path / "model.py").write_text(text)
    fix = {"pp": 2, "schedule": schedule, "activation_checkpointing": "none"}
    result = planner.estimate(
        str(tmp_path / "model.py"), gpus=2, cluster="cpu", dtype="float64",
        global_batch_size=8, fix=fix,
    )  # fmt: skip
    result.save(tmp_path / "plan")
    return tmp_path / "plan"


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV"])
@pytest.mark.parametrize(
    ("layer", "between", "output", "words"),
    [
        (ONCE, "y = self.other(tokens)", "x * y", "no gradient of model.other.weight"),
        (TWICE, "y = x", "y", "RuntimeError: Trying to backward through the graph a second time"),
    ],
    ids=["apart", "twice"],
)
def test_weights_that_the_second_part_misses_are_named(
    layer, between, output, words, schedule, tmp_path
):
    """torch trains on without the gradients of what no input of a stage leads to."""
    with pytest.raises(CodegenError, match=r"weights of stage \d is not what") as error:
        planned(tmp_path, layer=layer, between=between, output=output, schedule=schedule)
    assert words in str(error.value)
    assert "--fix schedule=1F1B" in error.value.hint


def test_what_comes_together_in_a_stage_is_divided(tmp_path):
    run = {"layer": ONCE, "between": "y = x + self.other(tokens)", "output": "y"}
    check = check_plan(planned(tmp_path, **run, schedule="ZBVZeroBubble"), run=True)
    assert check.traffic_holds
    assert check.trained.is_equal


def test_whole_backwards_bear_all_of_it(tmp_path):
    run = {"layer": TWICE, "between": "y = self.other(tokens)", "output": "x * y"}
    check = check_plan(planned(tmp_path, **run, schedule="Interleaved1F1B"), run=True)
    assert check.trained.is_equal
