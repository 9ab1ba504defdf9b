"""FLOPs and bytes per op."""

from itertools import pairwise

import pytest
import torch
from graph_models import ConvNet, Stream, example, images, token_loss, tokens, wrap
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from planner.graph.recording.work import traffic_bytes
from planner.graph.trace import trace_model


def real_flop(model: nn.Module, batch, loss_fn) -> int:
    inputs, targets = batch
    with FlopCounterMode(display=False) as counter:
        loss_fn(model(inputs), targets).backward()
    return counter.get_total_flops()


def test_flops_of_attention_and_mlp_equal_torchs_counter_on_a_real_run():
    graph = trace_model(wrap(Stream, tokens, token_loss), microbatch_size=3, dtype="float32")
    counted = real_flop(Stream(), tokens(3), token_loss)
    assert graph.forward_flop + graph.backward_flop == counted


@settings(max_examples=10, deadline=None)
@given(
    widths=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    size=st.integers(1, 5),
)
def test_flops_of_any_mlp_equal_torchs_counter(widths, size):
    def build():
        return nn.Sequential(*[nn.Linear(a, b) for a, b in pairwise(widths)])

    def batch(rows):
        return torch.randn(rows, widths[0]), None

    def loss_fn(output, _):
        return output.sum()

    graph = trace_model(wrap(build, batch, loss_fn), microbatch_size=size, dtype="float32")
    counted = real_flop(build(), batch(size), loss_fn)
    assert graph.forward_flop + graph.backward_flop == counted


def test_backward_of_grouped_convolutions_costs_two_forwards():
    graph = trace_model(
        wrap(ConvNet, images, functional.cross_entropy), microbatch_size=2, dtype="float32"
    )
    with FlopCounterMode(display=False) as counter:
        ConvNet()(images(2)[0])
    assert graph.forward_flop == counter.get_total_flops()
    # The gradient of the images is not needed.
    stem = 2 * 2 * 8 * 16 * 16 * 3 * 9
    assert graph.backward_flop == 2 * graph.forward_flop - stem


@pytest.mark.parametrize("seq_len", [16, 64])
def test_flops_of_llama_equal_the_closed_form(seq_len):
    graph = trace_model(
        example("llama.py:llama_tiny", seq_len=seq_len), microbatch_size=2, dtype="bfloat16"
    )
    dim, heads, kv_heads, ffn_dim, vocabulary, layers = 64, 8, 4, 192, 128, 8
    head_dim = dim // heads
    weights = 2 * dim * dim + 2 * dim * kv_heads * head_dim + 3 * dim * ffn_dim
    matmul = 2 * (layers * weights + vocabulary * dim) * 2 * seq_len
    attention = 4 * 2 * heads * head_dim * seq_len**2 * layers
    assert graph.forward_flop == matmul + attention
    # Fused attention makes its scores again in backward: five products instead of two.
    assert graph.backward_flop == 2 * matmul + attention * 5 // 2


def test_views_and_allocations_move_nothing():
    graph = trace_model(wrap(Stream, tokens, token_loss), microbatch_size=2, dtype="float32")
    views = [op for op in graph.nodes if op.is_view]
    assert views
    assert all(op.read_bytes == op.write_bytes == op.flop == 0 for op in views)
    assert traffic_bytes("empty_like", [8], [8], in_place=False) == (0, 0)


def test_gathers_read_only_the_rows_they_take():
    graph = trace_model(wrap(Stream, tokens, token_loss), microbatch_size=2, dtype="float32")
    (lookup,) = [op for op in graph.nodes if op.name == "embedding"]
    rows, indices = 2 * 8 * 16 * 4, 2 * 8 * 8
    assert (lookup.read_bytes, lookup.write_bytes) == (rows + indices, rows)


def test_overwriting_reads_only_the_source():
    assert traffic_bytes("copy_", [100, 40], [100], in_place=True) == (40, 100)
    assert traffic_bytes("add_", [100, 40], [100], in_place=True) == (140, 100)
