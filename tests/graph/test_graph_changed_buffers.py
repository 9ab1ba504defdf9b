"""Buffers that a forward changes, whether training reads them, and where stages may end then."""

import pytest
import torch
from graph_models import vectors, wrap
from torch import nn

from planner.graph.analysis.changed_buffers import buffers_that_steer, changed_buffers
from planner.graph.trace import trace_model


class Codes(nn.Module):
    """Rounds to the nearest code, and moves the codes: has no parameters."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(6, 4))

    def forward(self, x):
        nearest = torch.cdist(x, self.codes).argmin(-1)
        with torch.no_grad():
            counts = nn.functional.one_hot(nearest, 6).to(x.dtype)
            self.codes.mul_(0.9).add_(counts.T @ x, alpha=0.1)
        rounded = self.codes.clone()[nearest]
        return x + (rounded - x).detach(), (x - rounded.detach()).square().mean()


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.blocks = nn.Sequential(*(self.block() for _ in range(4)))
        self.codes = Codes()
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(()))

    def block(self):
        norm = nn.BatchNorm1d(4) if self.kind == "statistics" else nn.Identity()
        return nn.Sequential(nn.Linear(4, 4), norm, nn.Tanh())

    def forward(self, x):
        self.steps += 1
        if self.kind == "around":
            x = x * self.mean.clone()
        extra = 0.0
        for index, block in enumerate(self.blocks):
            x = block(x)
            if self.kind == "module" and index == 1:
                x, extra = self.codes(x)
        if self.kind == "around":
            self.mean.mul_(0.9).add_(x.detach().mean(), alpha=0.1)
        return x.square().mean() + extra


def traced(kind):
    return trace_model(wrap(lambda: Model(kind), vectors(4)), microbatch_size=8, dtype="float32")


@pytest.mark.parametrize(
    ("kind", "changed", "steering", "cuts"),
    [
        ("counter", {"steps"}, (), 4),
        ("statistics", {"steps", "blocks.2.1.running_var"}, (), 4),
        ("module", {"steps", "codes.codes"}, ("codes.codes",), 4),
        ("around", {"steps", "mean"}, ("mean",), 0),
    ],
)
def test_what_forward_changes_and_where_it_may_be_cut(kind, changed, steering, cuts):
    graph = traced(kind)
    assert changed <= set(changed_buffers(graph))
    assert buffers_that_steer(graph) == steering
    assert len(graph.cuts) == cuts
    assert ("the buffer mean" in graph.no_cut_reason) == (kind == "around")
