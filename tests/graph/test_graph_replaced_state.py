"""What a forward replaces or writes into, microbatches that a model refuses, and texts of CTC."""

import pytest
import torch
from graph_models import example, mean_square, vectors, wrap
from torch import nn
from torch.nn import functional

from planner.errors import ModelError
from planner.graph.analysis.changed_buffers import (
    buffers_that_steer,
    changed_buffers,
    changed_parameters,
)
from planner.graph.sizes.family import trace_family
from planner.graph.trace import trace_model
from planner.strategy.facts import model_facts


class Centred(nn.Module):
    """Replaces its mean, and a table that grows with its inputs."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("table", torch.zeros(1), persistent=False)

    def forward(self, x):
        y = (x - self.mean) * self.scale
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.table = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        return y + self.table


class Blocks(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x):
        return self.blocks(x)


def traced(factory):
    return trace_model(wrap(factory, vectors(4), mean_square), microbatch_size=8, dtype="float32")


def test_a_buffer_that_is_replaced_is_a_changed_one():
    graph = traced(lambda: Blocks(nn.Linear(4, 4), Centred(), nn.Linear(4, 4)))
    assert changed_buffers(graph) == ("blocks.1.mean",)
    assert buffers_that_steer(graph) == ("blocks.1.mean",)


def test_a_parameter_that_forward_writes_into_is_told():
    class Averaged(nn.Module):
        def __init__(self):
            super().__init__()
            self.student = nn.Linear(4, 4)
            self.teacher = nn.Linear(4, 4).requires_grad_(requires_grad=False)

        def forward(self, x):
            with torch.no_grad():
                self.teacher.weight.lerp_(self.student.weight, 0.1)
            return self.student(x) - self.teacher(x)

    assert changed_parameters(traced(Averaged)) == ("teacher.weight",)
    assert changed_parameters(traced(lambda: nn.Linear(4, 4))) == ()


def test_a_model_that_refuses_one_sample_is_planned_with_more():
    def normed():
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4))

    family = trace_family(wrap(normed, vectors(4), mean_square), dtype="float32")
    assert family.smallest.microbatch_size == 2
    assert "Expected more than 1 value per channel" in family.refusal(1)
    assert family.refusal(7) == ""
    assert family.is_affine


def test_rows_of_the_loss_are_those_of_one_sample_whatever_was_traced():
    family = trace_family(example("gpt.py"), dtype="float32")
    one, four = (model_facts(family.at(size)).loss for size in (1, 4))
    assert one.rows == four.rows == family.at(1).tokens_per_sample


def test_a_model_that_takes_pairs_runs_with_even_microbatches_alone():
    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            left, right = self.linear(x).view(2, -1, 4)
            return left * right

    family = trace_family(wrap(Pairs, vectors(4), mean_square), dtype="float32")
    assert family.smallest.microbatch_size == 2
    assert family.refusal(5)
    assert family.refusal(6) == ""
    with pytest.raises(ModelError, match="invalid for input"):
        family.at(3)


def test_the_model_itself_is_no_module_whose_output_a_stage_receives():
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
            self.decoder = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))

        def forward(self, x):
            mean, spread = self.encoder(x).chunk(2, -1)
            return self.decoder(mean) + 0 * mean, spread

    def loss(output, _):
        return output[0].square().mean() + output[1].square().mean()

    graph = trace_model(wrap(Split, vectors(4), loss), microbatch_size=4, dtype="float32")
    assert graph.cuts
    assert all(each.module for cut in graph.cuts for each in cut.carried)


def test_one_module_in_two_places_is_no_block():
    def listed():
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        return Blocks(first, second, first, second)

    graph = traced(listed)
    assert not graph.cuts
    assert "is also read outside of it" in graph.no_cut_reason


@pytest.mark.parametrize("longest", [3, 5])
def test_padded_texts_of_ctc_count_as_long_as_they_are_padded(longest):
    """Without reading lengths, which other batches have others of."""

    def batch(size):
        return torch.randn(size, 12, 4), torch.ones(size, 5, dtype=torch.long)

    def loss(output, targets):
        rows = output.log_softmax(-1).transpose(0, 1)
        count = rows.shape[1]
        lengths = torch.full((count,), longest)
        return functional.ctc_loss(rows, targets, torch.full((count,), 12), lengths)

    model = wrap(lambda: nn.Linear(4, 7), batch, loss)
    graph = trace_model(model, microbatch_size=2, dtype="float32")
    (op,) = (each for each in graph.nodes if each.name == "_fused_ctc_loss")
    assert graph.values[op.outputs[1]].shape == (2, 12, 2 * 5 + 1)
