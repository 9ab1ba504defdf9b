"""Signs that a trace is not what training runs."""

import pytest
import torch
from graph_models import example, mean_square, vectors, wrap
from torch import nn
from torch.utils.checkpoint import checkpoint

from planner.graph.analysis.trace_warnings import MOST_RUNS, trace_warnings
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
    (warning,) = trace_warnings(graph)
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
    assert trace_warnings(graph) == ()


def test_a_loop_over_tokens_is_suspicious():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.Linear(4, 4)

        def forward(self, x):
            for _ in range(MOST_RUNS + 1):
                x = x + 1
            return self.cell(x)

    model = wrap(lambda: nn.Sequential(Recurrent()), vectors(4), mean_square)
    graph = trace_model(model, microbatch_size=2, dtype="float32")
    (warning,) = trace_warnings(graph)
    assert warning.startswith("0 runs add 501 times in a forward pass: a loop over tokens")


class Steps(nn.Module):
    """Layers of equal cost, run as the function says."""

    def __init__(self, run):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(4)])
        self.run = run

    def forward(self, x):
        return self.run(self.layers, x)


class Product(torch.autograd.Function):
    """A product with an own backward of one product instead of two."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, _ = ctx.saved_tensors
        return grad, x.t() @ grad


def in_turn(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def warnings_of(run, prepare=lambda model: model):
    loaded = wrap(lambda: prepare(Steps(run)), vectors(4), mean_square)
    return trace_warnings(trace_model(loaded, microbatch_size=2, dtype="float32"))


def test_work_that_does_not_reach_the_loss_is_told():
    def half(layers, x):
        layers[3](layers[2](x))
        return layers[1](layers[0](x))

    # Of the two layers that are used the first needs no gradient of its input.
    (warning,) = warnings_of(half)
    assert warning == (
        "50% of the FLOPs of forward, the first in layers.2, have no backward: their results are "
        "detached or left over. Backward has 0.75 times the FLOPs of forward"
    )


@pytest.mark.parametrize(
    "run",
    [
        in_turn,
        lambda layers, x: checkpoint(in_turn, layers, x, use_reentrant=False),
        lambda layers, x: checkpoint(in_turn, layers[1:], layers[0](x), use_reentrant=True),
        lambda layers, x: Product.apply(in_turn(layers[:3], x), layers[3].weight),
        lambda layers, x: in_turn(layers, x) + torch.no_grad()(in_turn)(layers, x),
    ],
)
def test_checkpoints_and_own_functions_lose_nothing(run):
    assert warnings_of(run) == ()


def test_frozen_layers_lose_nothing():
    def freeze(model):
        model.layers[:3].requires_grad_(False)
        return model

    assert warnings_of(in_turn, freeze) == ()


@pytest.mark.parametrize("name", ["gpt.py", "llama.py", "mlp.py"])
def test_the_examples_raise_no_doubt(name):
    assert trace_warnings(trace_model(example(name), microbatch_size=1, dtype="bfloat16")) == ()
