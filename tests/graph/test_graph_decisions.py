"""What random draws decide: blocks that one may leave out are in no stage of their own."""

import pytest
import torch
from graph_models import mean_square, vectors, wrap
from torch import nn

from planner.graph.trace import trace_model


class Block(nn.Module):
    def __init__(self, inside=None):
        super().__init__()
        self.up, self.down, self.inside = nn.Linear(8, 16), nn.Linear(16, 8), inside

    def forward(self, x):
        y = self.up(x).relu()
        if self.inside is not None and self.inside():
            return x + y.mean()
        return x + self.down(y)


class Blocks(nn.Module):
    """Runs blocks; what it asks before each of them leaves the block out where it is true."""

    def __init__(self, leaves_out, inside=None):
        super().__init__()
        self.blocks = nn.ModuleList(Block(inside) for _ in range(3))
        self.leaves_out = leaves_out

    def forward(self, x):
        for block in self.blocks:
            if not self.leaves_out():
                x = block(x)
        return x


def traced(leaves_out, inside=None):
    model = wrap(lambda: Blocks(leaves_out, inside), vectors(8), mean_square)
    return trace_model(model, microbatch_size=2, dtype="float32")


DECIDE = {
    "below": lambda: torch.rand(()) < 0.1,
    "above": lambda: torch.rand([]) * 2 > 1.9,
    "uniform_": lambda: torch.empty(()).uniform_(-1, 1) > 0.9,
    "normal": lambda: torch.randn(()) > 3.0,
    "number": lambda: torch.randint(0, 10, ()).item() > 8,
    "bernoulli": lambda: torch.bernoulli(torch.tensor(0.2)) > 0,
    "bernoulli_": lambda: torch.empty(()).bernoulli_(0.2).bool(),
    "two": lambda: torch.rand(()) + torch.rand(()) < 0.2,
}
CANNOT = {
    "never": lambda: torch.rand(()) < 0.0,
    "uniform_": lambda: torch.empty(()).uniform_(0.5, 1) < 0.4,
    "number": lambda: torch.randint(0, 10, ()) > 9,
    "bernoulli": lambda: torch.bernoulli(torch.tensor(0.0)) > 0,
    "bernoulli_": lambda: torch.empty(()).bernoulli_(0.0).bool(),
    "constant": lambda: torch.arange(3).sum() > 5,
}


@pytest.mark.parametrize("name", DECIDE)
def test_a_block_that_a_draw_may_leave_out_begins_no_stage(name):
    graph = traced(DECIDE[name])
    assert len(graph.units) == 5
    assert graph.cuts == ()
    assert "between blocks.0 and blocks.1, a random draw that" in graph.no_cut_reason


@pytest.mark.parametrize("name", CANNOT)
def test_a_draw_that_decides_nothing_leaves_all_cuts(name):
    graph = traced(CANNOT[name])
    assert len(graph.cuts) == 3
    assert graph.no_cut_reason == ""


def test_what_a_block_decides_by_itself_leaves_all_cuts():
    graph = traced(lambda: False, inside=DECIDE["below"])
    assert len(graph.cuts) == 3
