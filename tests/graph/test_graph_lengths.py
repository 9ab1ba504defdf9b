"""Graphs at other lengths: evaluated ones equal fresh traces."""

import pytest
import torch
from graph_models import EXAMPLES, ZOO, example, wrap
from torch import nn

from planner.errors import RequestError
from planner.graph.sizes.lengths import LengthFamily
from planner.graph.trace import trace_model

POINTS = [(1, 40), (2, 24), (3, 56), (4, 12), (7, 61)]
"""Microbatch sizes and lengths away from the anchors 8, 16, 32 and the proof at 48."""


def fresh(model, size, length):
    return trace_model(model.with_seq_len(length), microbatch_size=size, dtype="bfloat16")


@pytest.mark.parametrize(
    ("folder", "name"),
    [(EXAMPLES, "llama.py"), (ZOO, "gpt_dropout.py"), (ZOO, "t5.py")],
)
def test_other_sizes_and_lengths_are_evaluated_exactly(folder, name):
    model = example(name, folder=folder)
    family = LengthFamily(model, longest=64, dtype="bfloat16")
    assert family.is_quadratic
    for size, length in POINTS:
        assert family.at(size, length) == fresh(model, size, length)


class Windowed(nn.Module):
    """Attention over the last tokens only: not a polynomial in the length."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        x = self.linear(x)
        window = min(x.shape[1], 20)
        return (x @ x[:, -window:].mT).softmax(-1).sum()


def windowed():
    def batch(size, seq_len=64):
        return torch.randn(size, seq_len, 8), None

    return wrap(Windowed, batch)


def test_a_model_that_follows_no_polynomial_is_traced_at_each_length():
    model = windowed()
    family = LengthFamily(model, longest=64, dtype="bfloat16")
    assert not family.is_quadratic
    for size, length in POINTS:
        assert family.at(size, length) == fresh(model, size, length)


def test_a_model_that_is_not_affine_in_the_batch_is_traced_at_each_point():
    model = example("moe.py", folder=ZOO)
    family = LengthFamily(model, longest=64, dtype="bfloat16")
    assert not family.is_quadratic
    assert family.at(3, 40) == fresh(model, 3, 40)


def test_lengths_outside_of_the_anchors_are_traced():
    model = windowed()
    family = LengthFamily(model, longest=20, dtype="bfloat16")
    assert family.at(2, 50) == fresh(model, 2, 50)
    assert family.at(2, 2) == fresh(model, 2, 2)


def test_impossible_lengths_are_refused():
    family = LengthFamily(example("mlp.py"), longest=64, dtype="bfloat16")
    with pytest.raises(RequestError, match="takes no seq_len"):
        family.at(2, 32)
    with pytest.raises(RequestError, match="at least 1"):
        LengthFamily(windowed(), longest=8, dtype="bfloat16").at(2, 0)
