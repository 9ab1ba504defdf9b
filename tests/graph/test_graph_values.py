"""What tracing knows of data."""

import pytest
import torch
from graph_models import mean_square, vectors, wrap
from torch import nn

from planner.errors import ModelError
from planner.graph.trace import trace_model


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)


def trace(forward, batch=None):
    model = type("Model", (Base,), {"forward": forward})
    return trace_model(
        wrap(model, batch or vectors(8), mean_square), microbatch_size=2, dtype="float32"
    )


def count(graph, name):
    return sum(op.name == name for op in graph.nodes)


def test_a_loop_count_from_integer_inputs_is_exact():
    def forward(self, x, times):
        for _ in range(int(times.item())):
            x = self.linear(x)
        return x

    graph = trace(forward, lambda size: ((torch.randn(size, 8), torch.tensor(3)), None))
    assert count(graph, "addmm") == 3


def test_a_branch_on_constants_is_exact():
    def forward(self, x):
        positions = torch.arange(x.shape[1], device=x.device)
        if (positions.diff() != 1).any():
            return self.linear(self.linear(x))
        return self.linear(x)

    assert count(trace(forward), "addmm") == 1


def test_a_constant_changed_in_place_is_not_stale():
    def forward(self, x):
        steps = torch.ones(2, dtype=torch.long, device=x.device)
        steps[0] = 5
        for _ in range(int(steps.sum())):
            x = self.linear(x)
        return x

    with pytest.raises(ModelError, match="reads the data of a tensor"):
        trace(forward)


def test_tensor_literals_are_known():
    def forward(self, x):
        weights = torch.tensor([2, 1, 4])
        for _ in range(int(weights.max())):
            x = self.linear(x)
        return x

    assert count(trace(forward), "addmm") == 4


def test_nonzero_of_a_constant_mask_has_its_real_size():
    def forward(self, x):
        mask = torch.arange(8, device=x.device) % 2 == 0
        return self.linear(x)[:, mask]

    graph = trace(forward)
    assert any(value.shape == (2, 4) for value in graph.values)


def test_indexing_with_positions_needs_no_data():
    def forward(self, x):
        order = self.linear(x).argsort(dim=-1)
        return self.linear(x)[torch.arange(x.shape[0])[:, None], order]

    assert count(trace(forward), "index") == 1


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: self.linear(x) if x.sum() > 0 else x,
        lambda self, x: self.linear(x)[x > 0],
        lambda self, x: self.linear(x) * x.max().item(),
    ],
)
def test_data_of_activations_is_refused_with_the_users_line(forward):
    with pytest.raises(ModelError, match="reads the data of a tensor") as error:
        trace(forward)
    assert "test_graph_values.py" in str(error.value)
    assert "lambda self, x" in str(error.value)
    assert "torch.where" in error.value.hint
