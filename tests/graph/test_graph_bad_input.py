"""What is said of models and data that cannot be traced."""

from pathlib import Path

import pytest
import torch
from graph_models import mean_square, vectors, wrap
from torch import nn
from torch.nn import functional

from planner.cli.main import run
from planner.errors import ModelError
from planner.graph.loading.load import load_model
from planner.graph.operator_graph import Phase
from planner.graph.recording.recorder import Recorder
from planner.graph.trace import trace_model


class Net(nn.Module):
    """A layer and a norm in whose forward the test says what happens."""

    def __init__(self, run):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("table", torch.ones(8))
        self.run = run

    def forward(self, x, *, scale=None):
        return self.run(self, x)


def fails(run, *words, batch=None, loss_fn=mean_square, dtype="float32"):
    loaded = wrap(lambda: Net(run), batch or vectors(8), loss_fn)
    with pytest.raises(ModelError) as error:
        trace_model(loaded, microbatch_size=2, dtype=dtype)
    for word in words:
        assert word in str(error.value)
    assert error.value.hint
    return error.value


def plain(net, x):
    return net.linear(x)


# Data ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ((), "missing a required argument: 'x'"),
        ((torch.ones(2, 8), torch.ones(2, 8)), "too many positional arguments"),
        ({"y": torch.ones(2, 8)}, "missing a required argument: 'x'"),
        ({"x": torch.ones(2, 8), "z": 1}, "got an unexpected keyword argument 'z'"),
    ],
)
def test_inputs_that_do_not_fit_forward(inputs, words):
    error = fails(plain, "forward(x, *, scale=None) of Net", words, batch=lambda _: (inputs, None))
    assert "example_batch returns" in error.hint


def test_the_inputs_that_were_given_are_named():
    batch = ({"y": torch.ones(2, 8), "n": 3}, None)
    error = fails(plain, batch=lambda _: batch)
    assert "y=a tensor of shape (2, 8) without a gradient, n=int as inputs" in error.hint


@pytest.mark.parametrize(
    "batch",
    [
        lambda size: (torch.ones(4, 8), None),
        lambda size: ((torch.ones(size, 8), torch.ones(8, 8)), None),
        lambda size: ({"x": torch.ones(8, size)}, None),
        lambda size: (torch.ones(size, 8), torch.tensor(1)),
        lambda size: (torch.ones(size, 8), {"labels": torch.ones(1, size)}),
    ],
)
def test_a_batch_whose_first_dim_is_not_the_microbatch(batch):
    error = fails(
        plain, "example_batch(2) returned a tensor of shape", "the samples (2)", batch=batch
    )
    assert "Put the batch first" in error.hint


def test_other_data_than_tensors_may_lie_in_a_batch():
    loaded = wrap(
        lambda: Net(plain),
        lambda size: ({"x": torch.ones(size, 8), "scale": 3}, "text"),
        mean_square,
    )
    assert trace_model(loaded, microbatch_size=2, dtype="float32").forward_flop == 2 * 2 * 8 * 8


def test_a_batch_of_the_wrong_size_or_type():
    fails(plain, "forward pass", "RuntimeError", "return net.linear(x)", batch=vectors(5))
    integers = lambda size: (torch.ones(size, 8, dtype=torch.long), None)  # noqa: E731
    error = fails(
        plain, "addmm tensors of float32 and int64", "return net.linear(x)", batch=integers
    )
    assert "x.to(weight.dtype)" in error.hint
    floats = lambda size: (torch.ones(size, 8), torch.ones(size))  # noqa: E731
    fails(plain, "loss_fn", "int64", batch=floats, loss_fn=functional.cross_entropy)
    embed = lambda net, x: functional.embedding(x, net.linear.weight)  # noqa: E731
    fails(embed, "'indices'", "functional.embedding(x, net.linear.weight)")


@pytest.mark.parametrize(
    ("run", "op"),
    [
        (lambda net, x: net.linear(x + net.table), "addmm tensors of bfloat16 and float32"),
        (lambda net, x: net.norm(x.float()), "layer_norm tensors of float32 and bfloat16"),
        (lambda net, x: x @ net.table[:, None], "mm tensors of bfloat16 and float32"),
        (
            lambda net, x: functional.scaled_dot_product_attention(
                x.view(2, 1, 1, 8), x.view(2, 1, 1, 8), net.linear(x).view(2, 1, 1, 8).float()
            ),
            "attention tensors of bfloat16 and float32",
        ),
        (
            lambda net, x: functional.conv1d(x[:, None], net.linear.weight[:, None].float()),
            "convolution tensors of bfloat16 and float32",
        ),
    ],
)
def test_mixed_precision_that_a_kernel_refuses(run, op):
    error = fails(run, op, "test_graph_bad_input.py", "training would stop", dtype="bfloat16")
    assert "buffers" in error.hint


def test_a_norm_may_have_weights_of_higher_precision():
    def run(net, x):
        return functional.layer_norm(
            net.linear(x), (8,), net.norm.weight.float(), net.norm.bias.float()
        )

    loaded = wrap(lambda: Net(run), vectors(8), mean_square)
    assert trace_model(loaded, microbatch_size=2, dtype="bfloat16").backward_flop


# Loss ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (lambda output, _: output, "a tensor of shape (2, 8)"),
        (lambda output, _: output.sum()[None], "a tensor of shape (1,)"),
        (lambda output, _: 1.0, "float"),
        (lambda output, _: (output.sum(), {}), "a tuple of 2"),
    ],
)
def test_a_loss_that_is_no_scalar(loss_fn, words):
    error = fails(plain, "must return a scalar tensor", f"returned {words}", loss_fn=loss_fn)
    assert "def loss_fn" in error.hint


@pytest.mark.parametrize(
    ("run", "loss_fn"),
    [
        (plain, lambda output, _: output.detach().sum()),
        (plain, lambda output, _: torch.zeros(())),
        (torch.no_grad()(plain), lambda output, _: output.sum()),
        (lambda net, x: net.linear.weight.data @ x.t(), lambda output, _: output.sum()),
        (lambda net, x: x, lambda output, _: output.sum()),
    ],
)
def test_a_loss_that_depends_on_no_parameter(run, loss_fn):
    error = fails(run, "depends on no parameter", "shape () without a gradient", loss_fn=loss_fn)
    assert "detach" in error.hint


# The model's code ------------------------------------------------------------------------------


def raises(error):
    def run(net, x):
        raise error

    return run


def test_errors_of_the_model_keep_their_type_message_and_line():
    error = fails(raises(KeyError("no such block")), "raised KeyError: 'no such block'")
    assert "test_graph_bad_input.py" in str(error)
    assert "raise error" in str(error)
    assert isinstance(error.__cause__, KeyError)


def test_a_model_that_calls_itself_without_end():
    def run(net, x):
        return run(net, x)

    error = fails(run, "RecursionError", "return run(net, x)")
    assert "without end" in error.hint


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit])
def test_interrupts_pass(error):
    with pytest.raises(error):
        trace_model(
            wrap(lambda: Net(raises(error())), vectors(8), mean_square),
            microbatch_size=2,
            dtype="float32",
        )


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    "run",
    [
        lambda net, x: torch.sparse.mm(torch.eye(2).to_sparse(), net.linear(x)),
        lambda net, x: net.linear(x).to_sparse(),
        lambda net, x: torch.sparse_coo_tensor(torch.zeros(2, 1).long(), net.table[:1]) @ x,
    ],
)
def test_sparse_tensors(run):
    error = fails(run, "parse")
    assert "use dense ones" in error.hint


def test_a_model_that_communicates_by_itself():
    def run(net, x):
        y = net.linear(x)
        torch.distributed.all_reduce(y)
        return y

    error = fails(run, "process group")
    assert "is_initialized" in error.hint


def test_an_operator_without_a_meta_kernel():
    library = torch.library.Library("planner_test", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    try:
        run = lambda net, x: torch.ops.planner_test.twice(net.linear(x))  # noqa: E731
        error = fails(run, "planner_test::twice has no kernel for tensors without data")
        assert 'register_fake("planner_test::twice")' in error.hint
    finally:
        library._destroy()


def test_a_forward_pass_that_does_not_end(monkeypatch):
    monkeypatch.setattr("planner.graph.recording.recorder.MOST_OPS", 1000)

    def run(net, x):
        while True:
            x = net.linear(x)

    error = fails(run, "more than 1,000 operators", "x = net.linear(x)")
    assert "shorter sequence" in error.hint


def test_what_calls_the_planner_is_no_code_of_the_model(monkeypatch, capsys):
    """Backward runs no line of it: the command line's own libraries are around it."""
    model = str(Path(__file__).parents[2] / "examples" / "mlp.py")
    graph = trace_model(load_model(model), microbatch_size=1, dtype="bfloat16")
    forward = sum(op.phase is Phase.FORWARD for op in graph.nodes)
    monkeypatch.setattr("planner.graph.recording.recorder.MOST_OPS", forward + 5)
    assert run(["trace", model]) == ModelError.exit_code
    message = capsys.readouterr().err
    assert f"more than {forward + 5} operators" in message
    assert "it is at" not in message


def test_a_failed_trace_leaves_no_hooks_behind():
    fails(raises(ValueError("no")), "ValueError")
    seen = []
    original = Recorder.enter_module
    Recorder.enter_module = lambda self, module, args: seen.append(module)
    try:
        nn.Linear(2, 2)(torch.ones(1, 2))
    finally:
        Recorder.enter_module = original
    assert seen == []
