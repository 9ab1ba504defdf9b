"""Signs that a trace is not what training runs."""

import pytest
from graph_models import example, mean_square, vectors, wrap
from torch import nn

from planner.graph import doubts
from planner.graph.trace import trace_model


class Branches(nn.Module):
    """Uses one of its two layers."""

    def __init__(self):
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x):
        return self.used(x)


def test_parameters_that_nothing_reads_are_named():
    graph = trace_model(wrap(Branches, vectors(4), mean_square), microbatch_size=2, dtype="float32")
    (warning,) = graph.warnings
    assert warning.startswith(
        "4 of 6 parameters are read by no operator (other.0.weight, other.0.bias, other.1.weight "
        "and 1 more)"
    )


def test_frozen_ones_are_no_concern():
    def build():
        model = Branches()
        model.other.requires_grad_(False)
        return model

    graph = trace_model(wrap(build, vectors(4), mean_square), microbatch_size=2, dtype="float32")
    assert graph.warnings == ()


def test_very_many_operators_are_suspicious(monkeypatch):
    graph = trace_model(example("mlp.py"), microbatch_size=2, dtype="float32")
    assert graph.warnings == ()
    monkeypatch.setattr(doubts, "MOST_OPS", len(graph.nodes) - 1)
    (warning,) = graph.warnings
    assert warning.startswith(f"{len(graph.nodes):,} operators: a loop over tokens in Python")


@pytest.mark.parametrize("name", ["gpt.py", "llama.py", "mlp.py"])
def test_the_examples_raise_no_doubt(name):
    assert trace_model(example(name), microbatch_size=1, dtype="bfloat16").warnings == ()
