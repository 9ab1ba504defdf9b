"""Autocast inside a model, as it works on CUDA."""

import re
from pathlib import Path

import pytest
import torch
from graph_models import mean_square, vectors, wrap
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from planner.errors import ModelError
from planner.graph import torch_private
from planner.graph.operator_graph import Phase
from planner.graph.recording import autocast
from planner.graph.trace import trace_model

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"

bfloat16 = torch.bfloat16


class Model(nn.Module):
    """Layers of several kinds; the test says how they run."""

    def __init__(self, run):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.run = run

    def forward(self, x):
        return self.run(self, x)


def trace(run, dtype="float32"):
    loaded = wrap(lambda: Model(run), vectors(8), mean_square)
    return trace_model(loaded, microbatch_size=4, dtype=dtype)


def results(graph, name, phase=Phase.FORWARD):
    ops = [op for op in graph.nodes if op.name == name and op.phase is phase]
    return [graph.values[op.outputs[0]].dtype for op in ops]


# Lists ---------------------------------------------------------------------------------------


def listed(macro):
    """Ops of one of the header's lists, as "softmax.int" or "linear"."""
    text = HEADER.read_text()
    body = re.search(rf"#define {macro}\(_\)(.*?)\n\n", text, re.DOTALL)[1]
    return {
        ".".join(part.strip() for part in entry.split(","))
        for entry in re.findall(r"_\(([\w, ]+)\)", body)
    }


def test_the_lists_are_those_of_torch():
    assert listed("AT_FORALL_LOWER_PRECISION_FP") == autocast.LOWER_PRECISION_OPS
    assert listed("AT_FORALL_FP32_SET_OPT_DTYPE") == autocast.OUTPUT_TYPE_OPS
    assert listed("AT_FORALL_PROMOTE") == autocast.WIDEST_TYPE_OPS
    others = autocast.OWN_KERNEL_OPS | set(autocast.APPENDED_TYPE_OPS)
    known = listed("AT_FORALL_FP32") | others | autocast.LOWER_PRECISION_OPS
    known |= autocast.OUTPUT_TYPE_OPS | autocast.WIDEST_TYPE_OPS
    assert set(torch_private.autocast_ops()) == known


# Types of results ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        (lambda net, x: net.linear(x), "bfloat16"),
        (lambda net, x: x @ net.linear.weight, "bfloat16"),
        (lambda net, x: torch.einsum("ij,kj->ik", x, net.linear.weight), "bfloat16"),
        (lambda net, x: net.lstm(x[:, None])[0], "bfloat16"),
        (lambda net, x: net.norm(net.linear(x)), "float32"),
        (lambda net, x: functional.rms_norm(net.linear(x), (8,)), "float32"),
        (lambda net, x: net.linear(x).exp(), "float32"),
        (lambda net, x: net.linear(x) ** 2, "float32"),
        (lambda net, x: net.linear(x).softmax(-1), "float32"),
        (lambda net, x: net.linear(x).softmax(-1, dtype=torch.float64), "float64"),
        (lambda net, x: net.linear(x).sum(-1), "float32"),
        (lambda net, x: net.linear(x).norm(), "float32"),
        (lambda net, x: net.linear(x).norm(dim=1), "float32"),
        (lambda net, x: functional.mse_loss(net.linear(x), x), "float32"),
        (lambda net, x: net.linear(x) + x, "float32"),
        (lambda net, x: functional.gelu(net.linear(x)), "bfloat16"),
        (lambda net, x: torch.addcmul(x, net.linear(x), net.linear(x)), "float32"),
        (lambda net, x: torch.dot(net.linear(x)[0], net.linear(x)[1]), "bfloat16"),
        (lambda net, x: x.double() @ net.linear.weight.double(), "float64"),
    ],
)
def test_each_op_gives_the_type_that_cuda_gives(call, dtype):
    seen = []

    def run(net, x):
        with torch.autocast("cuda", dtype=bfloat16):
            made = call(net, x)
        seen.append(made.dtype)
        return made.float()

    trace(run)
    assert seen == [getattr(torch, dtype)]


def test_gradients_have_the_type_of_their_tensor():
    def run(net, x):
        with torch.autocast("cuda", dtype=bfloat16):
            return net.linear(net.linear(x))

    graph = trace(run)
    assert results(graph, "addmm") == ["bfloat16"] * 2
    assert results(graph, "mm", Phase.BACKWARD) == ["bfloat16"] * 3
    weight = next(each for each in graph.parameters if each.names == ("linear.weight",))
    assert graph.storages[weight.storage].size_bytes == 8 * 8 * 4
    # Weight and bias are cast once for both calls, the input for each of them.
    assert results(graph, "_to_copy").count("bfloat16") == 2 + 1
    assert graph.notes == ()


def test_without_its_cache_parameters_are_cast_each_time():
    def run(net, x):
        with torch.autocast("cuda", dtype=bfloat16, cache_enabled=False):
            return net.linear(net.linear(x))

    assert results(trace(run), "_to_copy").count("bfloat16") == 4 + 1


def test_saved_bytes_are_those_of_a_real_run():
    def run(net, x, device="cuda"):
        with torch.autocast(device, dtype=bfloat16):
            for _ in range(4):
                x = functional.gelu(net.linear(x))
        return x

    # On the CPU these ops follow the same policy.
    torch.manual_seed(0)
    model = Model(lambda net, x: run(net, x, "cpu"))
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        mean_square(model(torch.randn(4, 8)), None)
    real = sum(each.nbytes() for address, each in kept.items() if address not in own)
    assert trace(run).saved_bytes == real


@pytest.mark.parametrize(("device", "enabled"), [("cuda", True), ("cpu", True), ("cuda", False)])
def test_the_line_that_switches_it_on_is_known(device, enabled):
    def run(net, x):
        with torch.autocast(device, dtype=bfloat16, enabled=enabled):
            return net.linear(x)

    place = f"test_graph_autocast.py:{run.__code__.co_firstlineno + 1}"
    assert trace(run).autocast == (place if enabled else "")


# Ways to use it --------------------------------------------------------------------------------


def decorated(net, x):
    return torch.autocast("cuda", dtype=bfloat16)(lambda: net.linear(x))()


def by_device_type(net, x):
    with torch.autocast(x.device.type, dtype=bfloat16):
        return net.linear(x)


def by_cuda_amp(net, x):
    with torch.amp.autocast("cuda", dtype=bfloat16):
        return net.linear(x)


def switched_off_inside(net, x):
    with torch.autocast("cuda", dtype=bfloat16):
        with torch.autocast(x.device.type, enabled=False):
            assert not torch.is_autocast_enabled(x.device.type)
            inner = net.linear(x)
        assert inner.dtype == torch.float32
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype(x.device.type) == bfloat16
        return net.linear(x)


@pytest.mark.parametrize("run", [decorated, by_device_type, by_cuda_amp, switched_off_inside])
def test_ways_to_use_it(run):
    graph = trace(run)
    assert results(graph, "addmm")[-1] == "bfloat16"
    assert graph.notes == ()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_inside_recomputes_in_the_same_types(use_reentrant):
    def run(net, x):
        with torch.autocast("cuda", dtype=bfloat16):
            x = net.linear(x)
            return checkpoint(lambda x: net.norm(net.linear(x)), x, use_reentrant=use_reentrant)

    graph = trace(run)
    assert results(graph, "addmm") == ["bfloat16"] * 2
    assert results(graph, "addmm", Phase.BACKWARD) == ["bfloat16"]
    assert results(graph, "native_layer_norm") == ["float32"]


def test_the_half_type_is_the_default():
    def run(net, x):
        with torch.autocast("cuda"):
            return net.linear(x)

    assert results(trace(run), "addmm") == ["float16"]


def test_what_torch_refuses_is_refused():
    def run(net, x):
        with torch.autocast("cuda"):
            return functional.binary_cross_entropy(net.linear(x).sigmoid(), x)

    with pytest.raises(ModelError, match="unsafe to autocast"):
        trace(run)


def test_autocast_for_another_device_is_told():
    def run(net, x):
        with torch.autocast("cpu", dtype=bfloat16):
            return net.linear(x)

    graph = trace(run)
    assert results(graph, "addmm") == ["float32"]
    (note,) = graph.notes
    assert "uses autocast for 'cpu', which changes nothing on a GPU" in note
    assert "test_graph_autocast.py" in note


def test_nothing_is_left_behind():
    calls = torch.autocast.__init__, torch.is_autocast_enabled, torch.clear_autocast_cache
    trace(by_device_type)
    assert calls == (
        torch.autocast.__init__,
        torch.is_autocast_enabled,
        torch.clear_autocast_cache,
    )
    assert not torch.is_autocast_enabled("cuda")
    with torch.device("meta"):
        layer = nn.Linear(2, 2)
        torch.set_autocast_enabled("cuda", True)
        try:
            assert layer(torch.empty(1, 2)).dtype == torch.float32
        finally:
            torch.set_autocast_enabled("cuda", False)
