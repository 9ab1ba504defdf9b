"""Fused kernels on the meta device."""

import pytest
import torch
from graph_models import mean_square, wrap
from torch import nn
from torch.nn import functional

from planner.graph.operator_graph import Phase
from planner.graph.recording.kernels import fused_kernels
from planner.graph.trace import trace_model


class Attend(nn.Module):
    def __init__(self, *, heads=4, kv_heads=4, mask=None, dropout=0.0):
        super().__init__()
        self.heads, self.kv_heads, self.mask, self.dropout = heads, kv_heads, mask, dropout
        self.q = nn.Linear(32, heads * 8)
        self.kv = nn.Linear(32, 2 * kv_heads * 8)

    def forward(self, x):
        size, length, _ = x.shape
        q = self.q(x).view(size, length, self.heads, 8).transpose(1, 2)
        kv = self.kv(x).view(size, length, 2, self.kv_heads, 8).transpose(1, 3)
        k, v = kv.unbind(2)
        mask = None
        if self.mask is not None:
            mask = torch.ones(length, length, device=x.device, dtype=self.mask)
        return functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout,
            is_causal=mask is None,
            enable_gqa=self.kv_heads != self.heads,
        )


def sequences(size):
    return torch.randn(size, 16, 32), None


def trace(build, dtype="bfloat16"):
    return trace_model(wrap(build, sequences, mean_square), microbatch_size=2, dtype=dtype)


def names(graph, phase=Phase.FORWARD):
    return [op.name for op in graph.nodes if op.phase is phase]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_attention_is_one_kernel_without_a_score_matrix(dtype):
    graph = trace(Attend, dtype)
    assert names(graph).count("_scaled_dot_product_flash_attention") == 1
    assert "_scaled_dot_product_flash_attention_backward" in names(graph, Phase.BACKWARD)
    assert not any(value.shape[-2:] == (16, 16) for value in graph.values)


def test_grouped_keys_and_values_stay_grouped():
    graph = trace(lambda: Attend(kv_heads=2))
    (attention,) = [op for op in graph.nodes if op.name == "_scaled_dot_product_flash_attention"]
    assert [graph.values[value].shape[1] for value in attention.inputs] == [4, 2, 2]
    assert attention.flop == 2 * 2 * 4 * 16 * 16 * (8 + 8)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_takes_the_memory_efficient_kernel(dtype):
    graph = trace(lambda: Attend(kv_heads=2, mask=dtype), "float32")
    (attention,) = [op for op in graph.nodes if op.name.endswith("efficient_attention")]
    assert len(attention.saved_inputs) == 4
    assert attention.flop == 2 * 2 * 4 * 16 * 16 * (8 + 8)
    repeats = [op for op in graph.nodes if op.name == "_repeat_heads"]
    assert [graph.values[op.inputs[0]].shape[1] for op in repeats] == [2, 2]
    assert [op.outputs[0] for op in repeats] == list(attention.inputs[1:3])
    back = [op for op in graph.nodes if op.name == "_repeat_heads_backward"]
    assert {graph.values[op.outputs[0]].shape[1] for op in back} == {2}


def test_attention_without_a_batch_dim():
    class Single(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x):
            q = self.linear(x)
            return functional.scaled_dot_product_attention(q, q, q)

    graph = trace(Single)
    assert "_scaled_dot_product_flash_attention" in names(graph)


def test_dropout_keeps_a_mask_of_one_byte():
    graph = trace(lambda: nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1)))
    (dropout,) = [op for op in graph.nodes if op.name == "native_dropout"]
    (mask,) = dropout.saved_outputs
    assert graph.values[mask].dtype == "bool"


def test_dropout_of_zero_is_no_op():
    graph = trace(lambda: nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.0)))
    assert "native_dropout" not in names(graph)


def test_rms_norm_is_fused_and_keeps_its_input_and_one_number_per_row():
    graph = trace(lambda: nn.Sequential(nn.Linear(32, 32), nn.RMSNorm(32)))
    (norm,) = [op for op in graph.nodes if op.name == "_fused_rms_norm"]
    (statistic,) = norm.saved_outputs
    assert graph.values[statistic].shape == (2, 16, 1)
    assert graph.values[statistic].dtype == "float32"
    assert len(norm.saved_inputs) == 2
    assert "_fused_rms_norm_backward" in names(graph, Phase.BACKWARD)


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3)])
def test_recurrent_layers_are_one_op(kind, gates):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = kind(32, 8, num_layers=2, batch_first=True)

        def forward(self, x):
            return self.rnn(x)[0]

    graph = trace(Recurrent, "float32")
    (rnn,) = [op for op in graph.nodes if op.name == "_fused_rnn"]
    assert rnn.flop == 2 * 2 * 16 * gates * 8 * (32 + 8 + 8 + 8)
    (backward,) = [op for op in graph.nodes if op.name == "_fused_rnn_backward"]
    assert backward.flop == 2 * rnn.flop


@pytest.mark.parametrize("as_tensors", [True, False])
def test_the_loss_of_alignments_keeps_what_each_step_needs(as_tensors):
    class Align(nn.Module):
        def __init__(self):
            super().__init__()
            self.classes = nn.Linear(32, 5)

        def forward(self, x, labels):
            log_probs = self.classes(x).float().log_softmax(-1).transpose(0, 1)
            steps, texts = [x.shape[1]] * len(x), [labels.shape[1]] * len(x)
            if as_tensors:
                steps, texts = torch.tensor(steps), (labels > 0).sum(-1)
                labels = labels.masked_select(labels > 0)
            return functional.ctc_loss(log_probs, labels, steps, texts)

    def batch(size):
        return (torch.randn(size, 16, 32), torch.randint(1, 5, (size, 6))), None

    graph = trace_model(wrap(Align, batch), microbatch_size=2, dtype="bfloat16")
    (loss,) = [op for op in graph.nodes if op.name == "_fused_ctc_loss"]
    kept = {graph.values[value].shape for value in loss.saved_outputs}
    assert (2, 16, 2 * 6 + 1) in kept
    with torch.device("cpu"):
        model, ((x, labels), _) = Align(), batch(2)
    _, log_alpha = torch.ops.aten._ctc_loss(
        model.classes(x).log_softmax(-1).transpose(0, 1), labels, [16] * 2, [6] * 2
    )
    assert tuple(log_alpha.shape) in kept


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_grouped_products_count_each_row_once(dtype):
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 32, 8))

        def forward(self, x):
            ends = torch.tensor([4, 8, 20, 32], dtype=torch.int32, device=x.device)
            return functional.grouped_mm(x.flatten(0, 1), self.weight, offs=ends)

    graph = trace(Experts, dtype)
    flops = [op.flop for op in graph.nodes if op.name == "_grouped_mm"]
    assert flops == [2 * 32 * 32 * 8] * 2  # forward, and the gradient of the weight
    assert {graph.values[op.outputs[0]].dtype for op in graph.nodes if op.flop} == {dtype}


def test_torch_is_left_as_it_was():
    x = torch.randn(1, 2, 4, 8)
    expected = functional.scaled_dot_product_attention(x, x, x)
    with fused_kernels():
        pass
    torch.testing.assert_close(functional.scaled_dot_product_attention(x, x, x), expected)
    assert functional.rms_norm(torch.empty(2, 8, device="meta"), [8]).shape == (2, 8)
