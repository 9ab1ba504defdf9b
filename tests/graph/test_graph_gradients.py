"""Whose gradient a piece of memory holds, told by autograd's wiring."""

import pytest
import torch
from graph_models import wrap
from real_runs import MODELS, load
from torch import nn

from planner.graph.operator_graph import StorageKind
from planner.graph.trace import trace_model


class Odd(nn.Module):
    """Square weights: fused, tied, cast, transposed and frozen."""

    def __init__(self):
        super().__init__()
        self.fused = nn.Parameter(torch.zeros(16, 8))
        self.tied = nn.Parameter(torch.zeros(8, 8))
        self.frozen = nn.Parameter(torch.zeros(8, 8), requires_grad=False)

    def forward(self, x):
        left, right = self.fused.chunk(2)
        x = (x @ left) * torch.sigmoid(x @ right.t())
        x = x @ self.tied + x @ self.frozen
        return (x.float() @ self.tied.float().t()).sum()


def trace(size):
    model = wrap(Odd, lambda size: (torch.randn(size, 8), None))
    return trace_model(model, microbatch_size=size, dtype="bfloat16")


def names_of(graph):
    """Name of the parameter by storage that holds its gradient or a part of it."""
    owners = {
        storage: graph.storages[graph.values[graph.storages[storage].gradient_of].storage]
        for storage in graph.parameter_gradients
    }
    return {storage: owner.name for storage, owner in owners.items()}


def test_equal_sizes_make_no_gradient_of_a_parameter():
    # With 8 samples every activation has the shape of a weight.
    assert names_of(trace(8)) == names_of(trace(5))
    assert set(names_of(trace(8)).values()) == {"fused", "tied"}


@pytest.mark.parametrize("name", MODELS)
def test_every_gradient_belongs_to_its_parameter(name):
    graph = trace_model(load(name), microbatch_size=2, dtype="bfloat16")
    names = names_of(graph)
    for parameter in graph.parameters:
        if parameter.gradient is not None:
            assert names[parameter.gradient] == graph.storages[parameter.storage].name
    trained = {graph.storages[each.storage].name for each in graph.parameters if each.gradient}
    assert set(names.values()) <= trained
    for storage in graph.storages:
        if storage.gradient_of is not None:
            assert storage.kind is StorageKind.ACTIVATION
            assert graph.values[storage.gradient_of].requires_grad
