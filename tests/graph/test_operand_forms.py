"""Whether kernels that go element by element find operands alike, as torch looks at them."""

import pytest
import torch
from graph_models import wrap
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from planner.graph.operator_graph import Phase
from planner.graph.trace import trace_model

ROWS, WIDTH = 6, 8


class Written(nn.Module):
    """Runs a function of a float32 tensor; a layer gives it a gradient."""

    def __init__(self, function) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.row = nn.Parameter(torch.ones(WIDTH))
        self.function = function

    def forward(self, x):
        return self.function(self.layer(x), self.row)


def operands_of(function, name):
    """What the forward ops of a name find."""
    build = wrap(
        lambda: Written(function),
        lambda size: (torch.randn(size, ROWS, WIDTH), None),
        lambda output, _: output.sum(),
    )
    graph = trace_model(build, microbatch_size=2, dtype="float32")
    return [
        op.operands for op in graph.nodes if op.name == name and op.phase is Phase.FORWARD
    ]  # fmt: skip


def halves(x, _):
    return torch.cat((x[..., 4:], x[..., :4]), -1)


@pytest.mark.parametrize(
    ("function", "name", "operands"),
    [
        (lambda x, _: x + x, "add", "even"),
        (lambda x, _: x * 2.0, "mul", "even"),
        (lambda x, _: x.transpose(1, 2) + x.transpose(1, 2), "add", "even"),
        (lambda x, row: x * row, "mul", "strided"),
        (lambda x, _: x + x.mean(-1, keepdim=True), "add", "strided"),
        (lambda x, _: -x[..., :4], "neg", "strided"),
        (lambda x, _: x.transpose(1, 2).contiguous(), "clone", "strided"),
        (halves, "cat", "strided"),
        (lambda x, _: x.bfloat16() * 2.0, "mul", "even"),
        (lambda x, _: x.bfloat16(), "_to_copy", "even"),
        (lambda x, _: x[..., :4].bfloat16(), "_to_copy", "cast"),
        (lambda x, _: x * x.bfloat16(), "mul", "cast"),
        (lambda x, row: x.bfloat16() * row, "mul", "cast"),
        (lambda x, _: x.double(), "_to_copy", "cast"),
        (lambda x, _: torch.where(x > 0, x, x), "where", "even"),
        (lambda x, row: x.view(-1, WIDTH) @ row.view(WIDTH, 1), "mm", "even"),
    ],
)
def test_a_kernel_finds_what_its_operands_are(function, name, operands):
    assert operands_of(function, name)[0] == operands  # what follows is the loss's


@settings(max_examples=20, deadline=None)
@given(order=st.permutations(range(3)), other=st.permutations(range(3)))
def test_views_of_one_memory_are_alike_where_their_dims_are_in_one_order(order, other):
    def function(x, _):
        x = x[:, :, :ROWS].contiguous().expand(-1, -1, -1)[: x.shape[0]]
        cube = x.new_ones(4, 4, 4) * x.mean()
        return cube.permute(*order) + cube.permute(*other)

    expected = "even" if list(order) == list(other) else "strided"
    assert operands_of(function, "add") == [expected]
