"""Tensors that autograd keeps for backward, against autograd itself."""

import pytest
import torch
from graph_models import ConvNet, Stream, example, images, token_loss, tokens, vectors, wrap
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from planner.graph.operator_graph import Phase, StorageKind
from planner.graph.recording.recorder import Recorder
from planner.graph.trace import trace_model


class Cube(torch.autograd.Function):
    """Saves its input, an intermediate and its output."""

    @staticmethod
    def forward(ctx, x):
        square = x * x
        result = square * x
        ctx.save_for_backward(x, square, result)
        return result

    @staticmethod
    def backward(ctx, grad):
        _, square, _ = ctx.saved_tensors
        return grad * 3 * square


class Cubes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return Cube.apply(torch.tanh(self.linear(x))).sum()


class Activations(nn.Module):
    """Ops that save outputs which the next op reads without saving, and in-place changes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        x = torch.sigmoid(self.linear(x))
        x = x + 1
        y = torch.exp(x)
        y = y.reshape(-1).clone()
        y[: y.numel() // 2] *= 2
        return functional.relu(self.linear(y.view_as(x)), inplace=True).sum()


CASES = {
    "gpt": lambda: example("gpt.py"),
    "llama": lambda: example("llama.py"),
    "mlp": lambda: example("mlp.py"),
    "convolutions": lambda: wrap(ConvNet, images, functional.cross_entropy),
    "attention": lambda: wrap(Stream, tokens, token_loss),
    "custom function": lambda: wrap(Cubes, vectors(8)),
    "activations": lambda: wrap(Activations, vectors(8)),
}


@pytest.mark.parametrize("case", CASES)
def test_saved_tensors_of_all_ops_are_exactly_those_autograd_packs(case, monkeypatch):
    packed = set()
    pack = Recorder.pack

    def spy(self, tensor):
        if self.phase is Phase.FORWARD:
            packed.add(self.table.keys[self.table.read(tensor, keep=True)][0])
        return pack(self, tensor)

    monkeypatch.setattr(Recorder, "pack", spy)
    graph = trace_model(CASES[case](), microbatch_size=2, dtype="float32")
    kinds = graph.storages
    saved = set()
    for op in graph.nodes:
        assert set(op.saved_inputs) <= set(op.inputs)
        assert set(op.saved_outputs) <= set(op.outputs)
        saved |= {graph.values[value].storage for value in op.saved_inputs + op.saved_outputs}
    assert saved == packed
    kept = {each for each in packed if kinds[each].kind is StorageKind.ACTIVATION}
    assert set(graph.saved_storages) == kept
    assert graph.saved_bytes == sum(kinds[each].size_bytes for each in kept)


def test_known_ops_save_what_their_derivative_needs():
    graph = trace_model(CASES["activations"](), microbatch_size=2, dtype="float32")

    def sides(name):
        (op,) = [op for op in graph.nodes if op.name == name and op.phase is Phase.FORWARD]
        return len(op.saved_inputs), len(op.saved_outputs)

    assert sides("sigmoid") == (0, 1)
    assert sides("exp") == (0, 1)
    assert sides("relu_") == (0, 1)
    assert sides("add") == (0, 0)


def test_storage_of_a_fused_projection_counts_once():
    graph = trace_model(CASES["gpt"](), microbatch_size=2, dtype="float32")
    attention = next(op for op in graph.nodes if op.name == "_scaled_dot_product_flash_attention")
    query, key, value = attention.saved_inputs
    assert len({graph.values[each].storage for each in (query, key, value)}) == 1


def test_a_models_own_checkpointing_is_seen():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 32)
            self.second = nn.Linear(32, 8)

        def inner(self, x):
            return self.second(torch.tanh(self.first(x)))

        def forward(self, x):
            return checkpoint(self.inner, x * 2, use_reentrant=False).sum()

    graph = trace_model(wrap(Checkpointed, vectors(8)), microbatch_size=4, dtype="float32")
    again = [op for op in graph.nodes if op.name == "tanh" and op.phase is Phase.BACKWARD]
    assert len(again) == 1
    assert graph.saved_bytes < 4 * 32 * 4
