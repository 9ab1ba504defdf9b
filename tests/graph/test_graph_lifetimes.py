"""Peaks of memory replayed from traces, against live tensors of real runs."""

from functools import cache

import pytest
from graph_models import EXAMPLES
from hypothesis import given
from hypothesis import strategies as st
from real_runs import MODELS, ZOO, load, measure, measure_on_meta, traced
from step_replay import step_peaks

from planner.graph.analysis.lifetimes import Moment, live_bytes
from planner.graph.analysis.retained import retained_bytes
from planner.graph.loading.load import load_model
from planner.graph.trace import trace_model
from planner.vocabulary import RECOMPUTATIONS

SIZE = 4


@pytest.mark.parametrize("recomputation", ["none", "full"])
@pytest.mark.parametrize("name", ["gpt", "llama", "resnet", "unet", "moe", "gpt_dropout"])
def test_the_peak_of_a_step_is_that_of_a_real_run(name, recomputation):
    loaded = load(name)
    graph = traced(name, size=SIZE)
    measured = measure(loaded, graph, recomputation, SIZE).peak_bytes
    assert step_peaks(graph, recomputation).step_bytes == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("name", ["gpt", "llama", "moe", "resnet", "unet", "vit"])
def test_the_peak_under_selective_recomputation_is_that_of_a_real_run(name):
    """What is kept is given back op by op while the rest is made again."""
    loaded = load(name)
    graph = traced(name, size=SIZE)
    measured = measure(loaded, graph, "selective", SIZE).peak_bytes
    assert step_peaks(graph, "selective").step_bytes == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("name", MODELS)
def test_the_peak_lies_above_what_is_kept_and_all_gradients(name):
    graph = traced(name, size=1, dtype="bfloat16")
    gradients = {each.gradient for each in graph.parameters if each.requires_grad}
    assert None not in gradients
    gradient_bytes = sum(graph.storages[each].size_bytes for each in gradients)
    for recomputation in RECOMPUTATIONS:
        peaks = step_peaks(graph, recomputation)
        assert peaks.step_bytes >= peaks.forward_bytes >= retained_bytes(graph, recomputation)
        assert peaks.step_bytes >= gradient_bytes


FULL_SIZE = {
    "llama_8b": (f"{EXAMPLES / 'llama.py'}:llama_8b", 8192),
    "gpt_1_3b": (f"{EXAMPLES / 'gpt.py'}:gpt_1_3b", 2048),
    "resnet_50": (str(ZOO / "resnet_50.py"), None),
    "unet_sdxl": (str(ZOO / "unet_sdxl.py"), None),
    "vit_22b": (str(ZOO / "vit_22b.py"), None),
}
"""Model and sequence length."""


@cache
def of_full_size(name):
    source, seq_len = FULL_SIZE[name]
    loaded = load_model(source, seq_len=seq_len)
    return loaded, trace_model(loaded, microbatch_size=2, dtype="bfloat16")


@pytest.mark.parametrize("recomputation", RECOMPUTATIONS)
@pytest.mark.parametrize(
    "name",
    ["llama_8b", *(pytest.param(name, marks=pytest.mark.bench) for name in list(FULL_SIZE)[1:])],
)
def test_a_model_of_full_size_keeps_and_peaks_as_torch_runs_it(name, recomputation):
    """Autograd and the checkpoints themselves run, on tensors without data."""
    loaded, graph = of_full_size(name)
    measured = measure_on_meta(loaded, graph, recomputation, 2)
    assert retained_bytes(graph, recomputation) == measured.kept_bytes
    loss_and_its_gradient = 2 * 4
    peak_bytes = step_peaks(graph, recomputation).step_bytes
    assert peak_bytes + loss_and_its_gradient == measured.peak_bytes


def test_a_frozen_parameter_has_no_gradient():
    graph = traced("lora", size=1)
    for parameter in graph.parameters:
        assert (parameter.gradient is None) == (not parameter.requires_grad)


PIECES = st.frozensets(st.integers(0, 5), max_size=4)


@given(touched=st.lists(PIECES, min_size=1, max_size=8), extra=st.integers(0, 3))
def test_a_piece_counts_from_its_first_to_its_last_moment(touched, extra):
    moments = [Moment(ops=(), touched=each) for each in touched]
    sizes = {piece: 10**piece for piece in range(5)}  # of piece 5 the size is unknown
    first = {
        p: min(i for i, each in enumerate(touched) if p in each) for p in set().union(*touched)
    }
    last = {p: max(i for i, each in enumerate(touched) if p in each) + extra for p in first}
    expected = [
        sum(size for p, size in sizes.items() if p in first and first[p] <= moment <= last[p])
        for moment in range(len(touched))
    ]
    assert live_bytes(moments, sizes, last) == expected
