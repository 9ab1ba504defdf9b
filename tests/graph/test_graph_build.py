"""Models whose construction reads data, names a device, or returns something special."""

import threading

import numpy as np
import pytest
import torch
from graph_models import Stream, mean_square, token_loss, tokens, vectors, wrap
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

from planner.errors import ModelError
from planner.graph.analysis.trace_warnings import trace_warnings
from planner.graph.trace import trace_model


class Rates(nn.Module):
    """Rates of each layer from the data of a tensor."""

    def __init__(self, take):
        super().__init__()
        rates = take(torch.linspace(0, 1, 4))
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for rate in rates if rate < 0.9])

    def forward(self, x):
        return self.layers(x)


def trace(build, batch=None, loss_fn=mean_square, dtype="float32"):
    return trace_model(wrap(build, batch or vectors(8), loss_fn), microbatch_size=2, dtype=dtype)


def count(graph, name):
    return sum(op.name == name for op in graph.nodes)


@pytest.mark.parametrize(
    "take",
    [
        lambda rates: [rate.item() for rate in rates],
        lambda rates: rates.tolist(),
        lambda rates: rates.numpy(),
        lambda rates: list(rates),
        lambda rates: np.asarray(rates) if rates.sum() > 0 else [],
        lambda rates: torch.from_numpy(np.ones(4)) * rates,
    ],
)
def test_small_data_is_real_while_a_model_is_built(take):
    graph = trace(lambda: Rates(take))
    assert count(graph, "addmm") == 3
    assert trace_warnings(graph) == ()


class Large(nn.Module):
    """A billion parameters, and a decision on data."""

    def __init__(self):
        super().__init__()
        self.narrow = nn.Linear(8, 1 << 15)
        self.wide = nn.Linear(1 << 15, 1 << 15)
        self.scale = nn.Parameter(torch.ones(8) * torch.arange(8).sum().item())

    def forward(self, x):
        return self.wide(self.narrow(x * self.scale))


def test_large_tensors_never_have_data(monkeypatch):
    real = []
    empty = torch.empty

    def spy(*args, **kwargs):
        made = empty(*args, **kwargs)
        real.append(0 if made.is_meta else made.numel())
        return made

    monkeypatch.setattr(torch, "empty", spy)
    graph = trace(Large)
    assert graph.num_parameters == 9 * (1 << 15) + (1 << 30) + (1 << 15) + 8
    assert max(real) <= 1 << 16


def test_what_needs_all_its_data_is_built_with_it_and_told():
    class Checked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(300, 300)
            if torch.isnan(self.linear.weight).any():
                raise ValueError("not a number")

        def forward(self, x):
            return self.linear(x)

    graph = trace(Checked, vectors(300))
    (note,) = trace_warnings(graph)
    assert "was built with data on the CPU (352.7 KiB)" in note
    assert "meta tensors" in note
    assert graph.num_parameters == 300 * 301


def test_what_needs_too_much_data_is_refused():
    class Checked(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(1 << 20, 1 << 20))
            self.weight.sum().item()

    with pytest.raises(ModelError, match="meta tensors") as error:
        trace(Checked)
    assert "self.weight.sum().item()" in str(error.value)


def test_errors_of_the_model_itself_are_not_tried_again():
    calls = []

    def build():
        calls.append(None)
        raise RuntimeError("broken")

    with pytest.raises(ModelError, match="RuntimeError: broken"):
        trace(build)
    assert len(calls) == 1


class OnCuda(nn.Module):
    """Names its device wherever it can."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8, device="cuda:0")
        self.other = nn.Linear(8, 8).cuda()
        self.third = nn.Linear(8, 8).to("cuda")
        self.register_buffer("scale", torch.ones(8).to(torch.device("cuda", 0), torch.float32))

    def forward(self, x):
        x = x.cuda(non_blocking=True) * self.scale
        noise = torch.zeros(x.shape, device="cuda") + torch.tensor([1.0], device="cuda")
        steps = torch.arange(3, device="cuda:0").sum().item()
        return self.third(self.other(self.linear(x))).to("cuda") + noise.to("cuda") * steps


def cuda_batch(size):
    return torch.ones(size, 8, device="cuda").cuda(), torch.zeros(size, 8).to("cuda")


def test_code_that_names_its_device_runs_on_the_meta_device():
    graph = trace(OnCuda, cuda_batch)
    assert count(graph, "addmm") == 3
    assert (None, 3) in {op.arguments for op in graph.nodes if op.name == "mul"}
    assert trace_warnings(graph) == ()


def test_a_default_device_of_the_model_file_is_no_obstacle():
    torch.set_default_device("cuda")
    try:
        graph = trace(OnCuda, cuda_batch)
    finally:
        torch.set_default_device(None)
    assert count(graph, "addmm") == 3


class Warmup(nn.Module):
    """Decides by the data of its buffers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("started", torch.tensor(False))
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.step += 1
        if self.started:
            return x * self.linear.bias
        for _ in range(int(self.step) + 1):
            x = self.linear(x)
        return x


def test_buffers_are_taken_as_they_are_built():
    graph = trace(Warmup)
    assert count(graph, "addmm") == 2
    assert len(graph.notes) == 2
    assert all("taken as the buffer is built" in note for note in graph.notes)


def test_buffers_of_an_object_are_not_read():
    model = Warmup()
    with pytest.raises(ModelError, match="reads the data"):
        trace(model)
    assert model.step == 0


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_an_object_is_left_as_it_is(device):
    with torch.device(device):
        model = Stream()
    model.eval()
    before = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    graph = trace(model, tokens, token_loss)
    assert graph.backward_flop > 0
    assert not model.training
    assert {name: id(each) for name, each in model.state_dict(keep_vars=True).items()} == before
    assert {each.device.type for each in model.parameters()} == {device}
    assert all(each.grad is None for each in model.parameters())


def test_a_compiled_object_is_traced_without_its_compiler():
    graph = trace(torch.compile(Stream(), backend="eager"), tokens, token_loss)
    assert graph.parameters[0].names[0] == "embed.weight"


def test_parametrized_weights():
    def build():
        return nn.Sequential(
            parametrizations.weight_norm(nn.Linear(8, 8)),
            parametrizations.spectral_norm(nn.Linear(8, 8)),
            parametrizations.orthogonal(nn.Linear(8, 8)),
        )

    graph = trace(build())
    # A direction, a length and a bias; a weight and a bias for each of the others.
    assert len(graph.parameters) == 7
    assert all(name.split(".")[0] in "012" for each in graph.parameters for name in each.names)


def test_weights_that_a_hook_makes():
    with pytest.warns(FutureWarning, match="weight_norm"):
        model = nn.Sequential(weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8))
    model(torch.ones(2, 8))
    graph = trace(model)
    assert sorted(name for each in graph.parameters for name in each.names) == [
        "0.bias",
        "0.weight_g",
        "0.weight_v",
        "1.bias",
        "1.weight",
    ]
    assert "_weight_norm_interface" in {op.name for op in graph.nodes}


@pytest.mark.parametrize(
    ("build", "words", "hint"),
    [
        (
            lambda: torch.compile(nn.Linear(8, 8), backend="eager"),
            "compiled module",
            "Return the module itself",
        ),
        (lambda: nn.DataParallel(nn.Linear(8, 8)), "DataParallel", "Return the bare module"),
        (lambda: nn.LazyLinear(8), "lazy module: the shape of weight", "nn.Linear"),
        (nn.DataParallel(nn.Linear(8, 8)), "DataParallel", "Return the bare module"),
        (nn.LazyLinear(8), "lazy module", "nn.Linear"),
    ],
)
def test_modules_that_are_no_plain_ones(build, words, hint):
    with pytest.raises(ModelError, match=words) as error:
        trace(build)
    assert hint in error.value.hint


def test_objects_that_cannot_be_copied():
    class Locked(nn.Linear):
        def __init__(self):
            super().__init__(8, 8)
            self.lock = threading.Lock()

    assert trace(Locked).forward_flop
    with pytest.raises(ModelError, match="Locked cannot be copied") as error:
        trace(Locked())
    assert "a function that builds" in error.value.hint


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_scripted_objects():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8)))
    with pytest.raises(ModelError, match="holds a scripted module"):
        trace(scripted)
    assert trace(lambda: torch.jit.script(nn.Linear(8, 8))).forward_flop


def test_special_tensors_as_parameters():
    class Special(torch.Tensor):
        pass

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8).as_subclass(Special))

    with pytest.raises(ModelError, match="weight is a Special"):
        trace(Model)
