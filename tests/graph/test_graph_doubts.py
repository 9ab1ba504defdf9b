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


def test_a_loop_over_tokens_is_suspicious():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.Linear(4, 4)

        def forward(self, x):
            for _ in range(doubts.MOST_RUNS + 1):
                x = x + 1
            return self.cell(x)

    model = wrap(lambda: nn.Sequential(Recurrent()), vectors(4), mean_square)
    graph = trace_model(model, microbatch_size=2, dtype="float32")
    (warning,) = graph.warnings
    assert warning.startswith("0 runs add 501 times in a forward pass: a loop over tokens")


@pytest.mark.parametrize("name", ["gpt.py", "llama.py", "mlp.py"])
def test_the_examples_raise_no_doubt(name):
    assert trace_model(example(name), microbatch_size=1, dtype="bfloat16").warnings == ()
