"""FLOPs of whole models against torch's counter on real runs, and against closed forms."""

import warnings
from contextlib import contextmanager
from math import prod

import pytest
import torch
from graph_models import example, mean_square, vectors, wrap
from hypothesis import given, settings
from hypothesis import strategies as st
from real_runs import MODELS, build, load, run_loss
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from planner.graph.analysis.causal import masked_flop, masked_pairs, phase_masked_flop
from planner.graph.operator_graph import Phase
from planner.graph.recording.work import kinds_of_work
from planner.graph.trace import trace_model
from planner.vocabulary import WorkKind

SIZE = 2

QUERY_GRADIENT_AT_THE_START = 2 * (2 * SIZE * 4 * 48 * 48)
"""zoo/lstm.py: in both layers the run on the CPU makes no gradient of the initial hidden state,
which needs none; the fused kernel makes that of every step."""


@contextmanager
def attention_in_steps():
    """Run attention as two plain products, which the counter knows on any device.

    Yields a list to which every call adds the FLOPs that a fused kernel has on top of that: it
    makes the scores again in backward, and gradients of query, key and value whether they are
    needed or not.
    """
    attend = functional.scaled_dot_product_attention
    fused: list[int] = []

    def noted(query, key, value, *args, **kwargs):
        unneeded = sum(not each.requires_grad for each in (query, key, value))
        fused.append((1 + unneeded) * 2 * prod(query.shape) * key.shape[-2])
        return attend(query, key, value, *args, **kwargs)

    functional.scaled_dot_product_attention = noted
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield fused
    finally:
        functional.scaled_dot_product_attention = attend


@contextmanager
def recurrence_in_steps():
    """Run recurrent layers as one product for each time step; the fused op is not counted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a GPU that is not there
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def counted_flop(loaded, size):
    """FLOPs of forward and backward that torch counts in a real run with fused kernels."""
    model, batch = build(loaded, size)
    with attention_in_steps() as fused, recurrence_in_steps():
        with FlopCounterMode(display=False) as forward:
            loss = run_loss(loaded, model, batch)
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    return forward.get_total_flops(), backward.get_total_flops() + sum(fused)


@pytest.mark.parametrize("name", MODELS)
def test_flops_equal_torchs_counter_on_a_real_run(name):
    loaded = load(name)
    graph = trace_model(loaded, microbatch_size=SIZE, dtype="float32")
    forward, backward = counted_flop(loaded, SIZE)
    if name == "lstm":
        backward += QUERY_GRADIENT_AT_THE_START
    assert forward > 0
    assert graph.forward_flop == forward
    assert graph.backward_flop == backward


LLAMAS = {
    "llama_8b": (4096, 32, 32, 8, 14336),
    "llama_70b": (8192, 80, 64, 8, 28672),
    "llama_405b": (16384, 126, 128, 8, 53248),
}
"""Width, layers, heads, heads of keys and values, width of the feed-forward layer."""


@pytest.mark.parametrize(
    "name", ["llama_8b", "llama_70b", pytest.param("llama_405b", marks=pytest.mark.bench)]
)
def test_flops_of_llama_3_equal_the_closed_form(name):
    """2 N T for the N weights of matrix products and T tokens, 4 b s^2 heads head_dim a layer."""
    dim, layers, heads, kv_heads, ffn_dim = LLAMAS[name]
    seq_len, vocabulary, head_dim = 8192, 128256, dim // heads
    graph = trace_model(
        example(f"llama.py:{name}", seq_len=seq_len), microbatch_size=1, dtype="bfloat16"
    )
    block = 2 * dim * dim + 2 * dim * kv_heads * head_dim + 3 * dim * ffn_dim
    matmul = 2 * (layers * block + vocabulary * dim) * seq_len
    attention = 4 * seq_len**2 * heads * head_dim * layers
    assert graph.forward_flop == matmul + attention
    assert graph.backward_flop == 2 * matmul + attention * 5 // 2
    # Of s x s pairs a causal mask leaves s (s + 1) / 2.
    left = attention * (seq_len + 1) // (2 * seq_len)
    assert phase_masked_flop(graph, Phase.FORWARD) == attention - left
    assert phase_masked_flop(graph, Phase.BACKWARD) == (attention - left) * 5 // 2


# Ops that torch's counter is silent about or wrong on ------------------------------------------


class Scaled(nn.Module):
    """A layer whose input needs a gradient, too."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.layer(x * self.scale)


CONVOLUTIONS = {
    (1, False): nn.Conv1d, (2, False): nn.Conv2d, (3, False): nn.Conv3d,
    (1, True): nn.ConvTranspose1d, (2, True): nn.ConvTranspose2d, (3, True): nn.ConvTranspose3d,
}  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(
    dims=st.integers(1, 3),
    transposed=st.booleans(),
    groups=st.integers(1, 4),
    channels=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    dilation=st.integers(1, 2),
    size=st.integers(1, 3),
)
def test_a_grouped_convolution_counts_as_its_groups_one_by_one(
    dims, transposed, groups, channels, kernel, stride, dilation, size
):
    """torch's counter takes the backward of g groups for g times as much work as it is."""
    kind = CONVOLUTIONS[dims, transposed]
    options = {"kernel_size": kernel, "stride": stride, "dilation": dilation, "padding": 1}

    def layer(number):
        return kind(channels[0] * number, channels[1] * number, groups=number, **options)

    def batch(number):
        return torch.randn(size, channels[0] * number, *[7] * dims), None

    graph = trace_model(
        wrap(lambda: Scaled(layer(groups)), lambda _: batch(groups), mean_square),
        microbatch_size=size,
        dtype="float32",
    )
    with FlopCounterMode(display=False) as forward:
        losses = [mean_square(Scaled(layer(1))(batch(1)[0]), None) for _ in range(groups)]
    with FlopCounterMode(display=False) as backward:
        for loss in losses:
            loss.backward()
    assert graph.forward_flop == forward.get_total_flops()
    assert graph.backward_flop == backward.get_total_flops()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_layers_count_as_their_steps(kind, bidirectional):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = kind(6, 5, 2, batch_first=True, bidirectional=bidirectional)

        def forward(self, x):
            return self.layers(x)[0]

    def batch(size):
        return torch.randn(size, 7, 6), None

    graph = trace_model(wrap(Recurrent, batch, mean_square), microbatch_size=3, dtype="float32")
    with recurrence_in_steps(), FlopCounterMode(display=False) as counter:
        Recurrent()(batch(3)[0])
    assert graph.forward_flop == counter.get_total_flops()
    assert graph.backward_flop == 2 * graph.forward_flop


def products(left, right):
    """Loss of a product of two parameters of these shapes."""

    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.left = nn.Parameter(torch.randn(left))
            self.right = nn.Parameter(torch.randn(right))

        def forward(self, _):
            return torch.matmul(self.left, self.right).sum()

    return wrap(Product, lambda size: (torch.randn(size), None))


@settings(max_examples=40, deadline=None)
@given(
    batch=st.lists(st.integers(1, 3), max_size=2),
    rows=st.none() | st.integers(1, 4),
    columns=st.none() | st.integers(1, 4),
    inner=st.integers(1, 4),
    broadcast=st.booleans(),
)
def test_products_of_any_shapes_count_two_for_each_multiply_add(
    batch, rows, columns, inner, broadcast
):
    """Vectors as well: torch's counter has no mv and no dot.

    Products of vectors have gradients that are pointwise, so only their forward is checked.
    """
    left = [*batch, rows, inner] if rows else [inner]
    right_batch = [] if broadcast or not columns or not rows else batch
    right = [*right_batch, inner, columns] if columns else [inner]
    graph = trace_model(products(left, right), microbatch_size=1, dtype="float32")
    batches = prod(batch) if rows else 1
    expected = 2 * batches * (rows or 1) * (columns or 1) * inner
    assert graph.forward_flop == expected
    if rows and columns:
        assert graph.backward_flop == 2 * expected


def test_grouped_products_of_experts_count_each_token_once():
    tokens, width, hidden, experts = 24, 16, 32, 4

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(width, width)
            self.weight = nn.Parameter(torch.randn(experts, width, hidden))

        def forward(self, x):
            ends = torch.arange(1, experts + 1, device=x.device, dtype=torch.int32)
            return functional.grouped_mm(self.embed(x), self.weight, offs=ends * 6)

    graph = trace_model(
        wrap(Experts, vectors(width), mean_square),
        microbatch_size=tokens,
        dtype="bfloat16",
    )
    grouped = [op.flop for op in graph.nodes if op.name == "_grouped_mm"]
    assert grouped == [2 * tokens * width * hidden] * 3


# Causal attention ------------------------------------------------------------------------------


class Attend(nn.Module):
    def __init__(self, heads=2):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.heads = heads

    def forward(self, query, key):
        query, key = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (query, key))
        return functional.scaled_dot_product_attention(
            query * self.scale, key * self.scale, key, is_causal=True
        )


@settings(max_examples=30, deadline=None)
@given(queries=st.integers(1, 12), keys=st.integers(1, 12))
def test_a_causal_mask_spares_the_pairs_above_the_diagonal(queries, keys):
    hidden = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    assert masked_pairs(queries, keys) == int(hidden.sum())
    # The mask is the one that torch's is_causal stands for.
    q, k = torch.randn(1, 1, queries, 4), torch.randn(1, 1, keys, 4)
    attend = functional.scaled_dot_product_attention
    torch.testing.assert_close(attend(q, k, k, is_causal=True), attend(q, k, k, attn_mask=~hidden))


@pytest.mark.parametrize(("queries", "keys"), [(8, 8), (4, 12), (12, 4)])
def test_masked_flops_of_unequal_lengths(queries, keys):
    graph = trace_model(
        wrap(
            Attend,
            lambda size: ((torch.randn(size, queries, 16), torch.randn(size, keys, 16)), None),
            mean_square,
        ),
        microbatch_size=3,
        dtype="bfloat16",
    )
    kernels = [op for op in graph.nodes if "attention" in op.name]
    assert [op.phase for op in kernels] == [Phase.FORWARD, Phase.BACKWARD]
    hidden = int(torch.ones(queries, keys).triu(1).sum())
    # Products over the head dim of 8 for each of 3 x 2 heads: two of them, then five.
    assert [masked_flop(graph, op) for op in kernels] == [
        2 * 3 * 2 * hidden * 8 * count for count in (2, 5)
    ]
    assert (
        phase_masked_flop(graph, Phase.FORWARD) + phase_masked_flop(graph, Phase.BACKWARD)
        == 2 * 3 * 2 * hidden * 8 * 7
    )
    # The flash kernel takes a causal mask of equal lengths only.
    assert ("flash" in kernels[0].name) == (queries == keys)


def test_without_a_causal_mask_nothing_is_spared():
    graph = trace_model(load("dit"), microbatch_size=1, dtype="bfloat16")
    assert any("attention" in op.name for op in graph.nodes)
    assert phase_masked_flop(graph, Phase.FORWARD) == phase_masked_flop(graph, Phase.BACKWARD) == 0


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("gpt", {WorkKind.PRODUCTS, WorkKind.ATTENTION}),
        ("unet", {WorkKind.PRODUCTS, WorkKind.ATTENTION, WorkKind.CONVOLUTION}),
        ("lstm", {WorkKind.PRODUCTS, WorkKind.RECURRENCE}),
    ],
)
def test_the_kinds_of_ops_that_do_the_work(name, kinds):
    graph = trace_model(load(name), microbatch_size=SIZE, dtype="float32")
    assert set(kinds_of_work((op.name, op.flop) for op in graph.nodes)) == kinds


def test_ops_with_little_of_the_work_are_no_kind_of_a_model():
    assert kinds_of_work([("mm", 990), ("convolution", 10), ("add", 0)]) == (WorkKind.PRODUCTS,)
    assert kinds_of_work([("_grouped_mm_backward", 3), ("addmm", 2)]) == (
        WorkKind.GROUPED,
        WorkKind.PRODUCTS,
    )
    assert kinds_of_work([("add", 0)]) == ()
