"""The operator graph of one step."""

import gc
from pathlib import Path

import networkx as nx
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
from torch import nn
from torch.nn import functional

from planner.graph.analysis.ops import dataflow_graph
from planner.graph.operator_graph import Phase, StorageKind
from planner.graph.trace import trace_model


@pytest.fixture(scope="module")
def gpt():
    return trace_model(example("gpt.py"), microbatch_size=2, dtype="float32")


def test_ops_are_in_execution_order_and_every_value_has_one_producer(gpt):
    assert [op.id for op in gpt.nodes] == list(range(len(gpt.nodes)))
    phases = [op.phase for op in gpt.nodes]
    assert phases == sorted(phases, key=lambda phase: phase is Phase.BACKWARD)
    made = [value for op in gpt.nodes for value in op.outputs]
    assert len(made) == len(set(made))
    producer = {value: op.id for op in gpt.nodes for value in op.outputs}
    assert all(producer.get(value, -1) < op.id for op in gpt.nodes for value in op.inputs)


def test_values_without_a_producer_are_parameters_buffers_and_inputs(gpt):
    made = {value for op in gpt.nodes for value in op.outputs}
    kinds = {
        gpt.storages[gpt.values[value].storage].kind
        for op in gpt.nodes
        for value in op.inputs
        if value not in made
    }
    assert kinds == {StorageKind.PARAMETER, StorageKind.INPUT, StorageKind.TARGET}


def test_the_loss_is_reachable_from_the_embedding(gpt):
    graph = dataflow_graph(gpt)
    assert nx.is_directed_acyclic_graph(graph)
    first = next(op.id for op in gpt.nodes if op.name == "embedding")
    last = max(op.id for op in gpt.nodes if op.phase is Phase.FORWARD)
    assert last in nx.descendants(graph, first)


def test_modules_are_the_innermost_that_run_an_op(gpt):
    products = [op for op in gpt.nodes if op.name == "addmm" and op.phase is Phase.FORWARD]
    assert [op.module for op in products[:4]] == [
        "transformer.h.0.attn.c_attn",
        "transformer.h.0.attn.c_proj",
        "transformer.h.0.mlp.c_fc",
        "transformer.h.0.mlp.c_proj",
    ]
    assert {op.module for op in gpt.nodes if "nll_loss" in op.name} == {""}


def test_backward_ops_know_their_forward_op(gpt):
    heavy = [op for op in gpt.nodes if op.phase is Phase.BACKWARD and op.flop]
    assert heavy
    for op in heavy:
        forward = gpt.nodes[op.forward_op]
        assert forward.phase is Phase.FORWARD
        assert forward.module == op.module
        assert forward.flop
    backward_of = [op.forward_op for op in heavy]
    forward_heavy = [op.id for op in gpt.nodes if op.phase is Phase.FORWARD and op.flop]
    assert set(backward_of) == set(forward_heavy)


def test_arguments_are_plain_data(gpt):
    (attention,) = {
        op.arguments for op in gpt.nodes if op.name == "_scaled_dot_product_flash_attention"
    }
    assert attention[:5] == (None, None, None, 0.0, True)
    splits = {op.arguments for op in gpt.nodes if op.name == "split"}
    assert splits == {(None, 64, 2)}

    def plain(item):
        if isinstance(item, tuple):
            return all(plain(each) for each in item)
        return item is None or isinstance(item, (bool, int, float, str))

    assert all(plain(op.arguments) and plain(op.keyword_arguments) for op in gpt.nodes)


def test_parameters_are_listed_once_with_all_their_names(gpt):
    tied = [each for each in gpt.parameters if len(each.names) > 1]
    assert [each.names for each in tied] == [("transformer.wte.weight", "lm_head.weight")]
    model = example("gpt.py").make_model()
    assert gpt.num_parameters == sum(each.numel() for each in model.parameters())
    kinds = {gpt.storages[each.storage].kind for each in gpt.parameters}
    assert kinds == {StorageKind.PARAMETER}


def test_frozen_parameters_are_marked_and_get_no_gradient():
    def build():
        model = Stream(tied=False)
        model.embed.weight.requires_grad_(False)
        return model

    graph = trace_model(wrap(build, tokens, token_loss), microbatch_size=2, dtype="float32")
    frozen = [each.names for each in graph.parameters if not each.requires_grad]
    assert frozen == [("embed.weight",)]
    assert "embedding_dense_backward" not in {op.name for op in graph.nodes}


def test_in_place_ops_make_a_new_value_on_the_same_storage():
    graph = trace_model(
        wrap(ConvNet, images, functional.cross_entropy), microbatch_size=2, dtype="float32"
    )
    (relu,) = [op for op in graph.nodes if op.name == "relu_"]
    (before,), (after,) = relu.inputs, relu.outputs
    assert before != after
    assert graph.values[before].storage == graph.values[after].storage
    (following,) = [op for op in graph.nodes if op.id > relu.id and after in op.inputs][:1]
    assert following.name == "convolution"
    assert not any(before in op.inputs for op in graph.nodes if op.id > relu.id)


def test_writing_a_slice_renews_the_whole():
    class Fill(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            out = torch.zeros(x.shape[0], 8)
            out[:, :4] = self.linear(x)
            out[:, 4:] = x
            return out

    graph = trace_model(wrap(Fill, vectors(4), mean_square), microbatch_size=2, dtype="float32")
    data_flow = dataflow_graph(graph)
    product = next(op.id for op in graph.nodes if op.name == "addmm")
    loss = next(op.id for op in graph.nodes if op.name == "mean")
    assert loss in nx.descendants(data_flow, product)


def test_reduced_precision_is_what_a_mixed_precision_run_does():
    graph = trace_model(example("llama.py"), microbatch_size=2, dtype="bfloat16")
    dtypes = {graph.values[op.outputs[0]].dtype for op in graph.nodes if op.name in ("mm", "addmm")}
    assert dtypes == {"bfloat16"}
    # Rotary tables are float32 buffers, and what they multiply becomes float32.
    rotated = [op for op in graph.nodes if op.name == "mul" and op.module == "layers.0.attention"]
    assert {graph.values[op.outputs[0]].dtype for op in rotated} == {"float32"}
    # The loss sees float32 logits.
    losses = [op for op in graph.nodes if op.name == "_log_softmax"]
    assert [graph.values[op.inputs[0]].dtype for op in losses] == ["float32"]
    buffers = {each.name: each.size_bytes for each in graph.storages if each.name in ("cos", "sin")}
    assert buffers == {"cos": 64 * 4 * 4, "sin": 64 * 4 * 4}


def test_float64_runs_in_float64():
    graph = trace_model(example("mlp.py"), microbatch_size=2, dtype="float64")
    dtypes = {value.dtype for value in graph.values}
    assert dtypes == {"float64", "int64"}


@pytest.mark.parametrize(
    ("source", "seq_len", "expected"),
    [("gpt.py", None, 64), ("gpt.py", 32, 32), ("mlp.py", None, 1)],
)
def test_tokens_per_sample(source, seq_len, expected):
    graph = trace_model(example(source, seq_len=seq_len), microbatch_size=3, dtype="float32")
    assert graph.tokens_per_sample == expected
    assert graph.microbatch_size == 3


def test_no_weights_are_allocated_for_a_large_model():
    def resident_bytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident_bytes()
    loaded = example("llama.py:llama_70b", seq_len=8192)
    graph = trace_model(loaded, microbatch_size=1, dtype="bfloat16")
    assert graph.num_parameters == pytest.approx(70.55e9, rel=1e-3)
    assert resident_bytes() - before < 512 * 1024**2


def test_the_garbage_collector_is_left_as_it_was():
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        trace_model(example("mlp.py"), microbatch_size=1, dtype="float32")
        assert gc.isenabled()
        assert 0.9 * frozen < gc.get_freeze_count() <= frozen
    finally:
        gc.unfreeze()
    trace_model(example("mlp.py"), microbatch_size=1, dtype="float32")
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
