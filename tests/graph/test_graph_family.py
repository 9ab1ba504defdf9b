"""Graphs at any microbatch size from a few traces."""

import pytest
import torch
from graph_models import (
    ConvNet,
    Stream,
    example,
    images,
    mean_square,
    token_loss,
    tokens,
    vectors,
    wrap,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from planner.errors import ModelError, RequestError
from planner.graph.sizes import family as family_module
from planner.graph.sizes.family import trace_family
from planner.graph.sizes.grown import Grown
from planner.graph.trace import trace_model
from planner.strategy.nodes import fold_unit

CASES = {
    "gpt": lambda: example("gpt.py"),
    "llama": lambda: example("llama.py"),
    "mlp": lambda: example("mlp.py"),
    "attention": lambda: wrap(Stream, tokens, token_loss),
    "convolutions": lambda: wrap(ConvNet, images, functional.cross_entropy),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_evaluated_graphs_equal_fresh_traces(case, dtype):
    family = trace_family(CASES[case](), dtype=dtype)
    assert family.is_affine
    for size in (1, 2, 5, 8):
        assert family.at(size) == trace_model(CASES[case](), microbatch_size=size, dtype=dtype)


GPT_FAMILY = trace_family(example("gpt.py"), dtype="float32")


@settings(max_examples=15, deadline=None)
@given(size=st.integers(1, 64))
def test_gpt_at_any_size_equals_a_fresh_trace(size):
    fresh = trace_model(example("gpt.py"), microbatch_size=size, dtype="float32")
    assert GPT_FAMILY.at(size) == fresh


@pytest.mark.parametrize("case", CASES)
def test_what_sizes_have_in_common_is_that_of_fresh_traces(case):
    family = trace_family(CASES[case](), dtype="float32")
    for size in (8, 5):  # what is known of the first is taken for the second
        graph = family.at(size)
        fresh = trace_model(CASES[case](), microbatch_size=size, dtype="float32")
        for name in set(family_module._OF_NO_SIZE) - {"wiring"}:
            assert getattr(graph, name) == getattr(fresh, name)
        one, other = ([fold_unit(g, unit) for unit in g.units] for g in (graph, fresh))
        assert one == other
        assert graph.wiring.keys() == fresh.wiring.keys()


def test_items_are_grown_where_they_are_read():
    grown = []

    def grow(item, growth):
        grown.append(item)
        return item + growth

    items = Grown((1, 2, 3, 4), {1: 10, 3: 20}, grow)
    assert (items[3], items[-1], items[0]) == (24, 24, 1)
    assert grown == [4]
    assert items[1:] == (12, 3, 24)
    every = (1, 12, 3, 24)
    assert items == every
    assert every == items
    assert items != (1, 12, 3)
    assert items != (1, 12, 3, 25)
    assert grown == [4, 2]


def test_sizes_above_the_traced_ones_run_no_model(monkeypatch):
    family = trace_family(example("gpt.py"), dtype="float32")

    def refuse(*_, **__):
        raise AssertionError("traced again")

    monkeypatch.setattr(family_module, "record_step", refuse)
    graph = family.at(16)
    assert family.at(16) is graph
    assert graph.forward_flop == 16 * family.at(1).forward_flop


def test_samples_share_work_where_each_has_as_much_in_any_batch():
    assert GPT_FAMILY.work_is_shared

    class Differences(nn.Module):
        """A batch of n has n - 1 of them: a sample has more, the larger its batch."""

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            y = self.linear(x)
            return torch.cat([y[:1], torch.tanh(y[1:] - y[:-1])])

    family = trace_family(wrap(Differences, vectors(8), mean_square), dtype="float32")
    assert family.is_affine
    assert not family.work_is_shared


def test_a_batch_of_one_may_be_its_own_program():
    class Squeezes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            x = self.linear(x)
            return (x.tanh() if x.shape[0] == 1 else x.sin()).sum()

    loaded = wrap(Squeezes, vectors(8))
    family = trace_family(loaded, dtype="float32")
    assert family.is_affine
    for size in (1, 2, 7):
        assert family.at(size) == trace_model(loaded, microbatch_size=size, dtype="float32")
    assert "tanh" in {op.name for op in family.at(1).nodes}


def test_work_that_is_not_affine_is_traced_at_each_size():
    class Contrast(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            x = self.linear(x)
            return torch.log_softmax(x @ x.T, -1).diagonal().sum()

    loaded = wrap(Contrast, vectors(8))
    family = trace_family(loaded, dtype="float32")
    assert not family.is_affine
    for size in (1, 6):
        assert family.at(size) == trace_model(loaded, microbatch_size=size, dtype="float32")


def test_a_size_that_the_model_refuses_is_an_error_only_there():
    def build():
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))

    loaded = wrap(build, vectors(8), lambda output, _: output.sum())
    family = trace_family(loaded, dtype="float32")
    assert family.at(4).microbatch_size == 4
    with pytest.raises(ModelError, match="more than 1 value"):
        family.at(1)


def test_a_microbatch_below_one_is_refused():
    with pytest.raises(RequestError, match="at least 1"):
        GPT_FAMILY.at(0)


def test_all_blocks_of_the_largest_llama_are_one_structure():
    loaded = example("llama.py:llama_405b", seq_len=4096)
    graph = trace_model(loaded, microbatch_size=1, dtype="bfloat16")
    assert len(graph.units) == 128
    assert len({unit.structure for unit in graph.units[1:-1]}) == 1
    assert graph.num_parameters == pytest.approx(405.85e9, rel=1e-3)
