"""Layers and ways to write a model that are rarer than transformers and convolutions.

FLOPs of forward and backward against torch's counter on a real run on the CPU, or against a closed
form where that counter misses the kernel.
"""

import functools

import pytest
import torch
from graph_models import wrap
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.flop_counter import FlopCounterMode

from planner.errors import ModelError
from planner.graph.analysis.trace_warnings import trace_warnings
from planner.graph.operator_graph import Phase
from planner.graph.trace import trace_model

SIZE, STEPS, WIDTH = 3, 6, 16


class Model(nn.Module):
    """Modules and parameters by name, and a function that runs them."""

    def __init__(self, parts, run):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = run

    def forward(self, *inputs):
        return self.run(self, *inputs)


def mean_square(output, _):
    outputs = output if isinstance(output, (tuple, list)) else [output]
    total = 0.0
    for each in outputs:
        if isinstance(each, Tensor) and (each.is_floating_point() or each.is_complex()):
            total = total + (torch.view_as_real(each) if each.is_complex() else each).pow(2).mean()
    return total


def sequences(size):
    return torch.randn(size, STEPS, WIDTH), None


def images(size):
    return torch.randn(size, 4, 8, 8), None


def volumes(size):
    return torch.randn(size, 3, 4, 8, 8), None


def words(size):
    return torch.randint(0, 32, (size, 5)), None


def square():
    return {"linear": nn.Linear(WIDTH, WIDTH)}


def pair():
    return {"mean": nn.Linear(WIDTH, WIDTH), "spread": nn.Linear(WIDTH, WIDTH)}


def parts(**modules):
    return lambda: {name: make() for name, make in modules.items()}


def over_steps(net, x):
    state = x.new_zeros(x.shape[0], WIDTH)
    for step in range(x.shape[1]):
        state = net.cell(x[:, step], state)
    return state


def lstm_over_steps(net, x):
    state = x.new_zeros(2, x.shape[0], WIDTH).unbind()
    for step in range(x.shape[1]):
        state = net.cell(x[:, step], state)
    return state[0]


def rotate(net, x):
    angles = torch.polar(torch.ones(WIDTH // 2), torch.arange(WIDTH // 2).float())
    return torch.view_as_real(torch.view_as_complex(net.linear(x).unflatten(-1, (-1, 2))) * angles)


def ensemble(net, x):
    weights = {name: torch.stack([each, each]) for name, each in net.linear.named_parameters()}
    call = lambda weights, x: torch.func.functional_call(net.linear, weights, (x,))  # noqa: E731
    return torch.func.vmap(call, in_dims=(0, None))(weights, x)


def quantize(net, x):
    z = net.linear(x)
    code = net.codes(torch.cdist(z, net.codes.weight[None]).argmin(-1))
    return z + (code - z).detach(), (code - z.detach()).pow(2)


def write_slices(net, x):
    out = x.new_zeros(x.shape)
    for step in range(x.shape[1]):
        out[:, step] = net.linear(x[:, step])
    out[out > 1] = 0.0
    return out


def moving_average(net, x):
    y = net.linear(x)
    with torch.no_grad():
        net.codes.weight.mul_(0.9).add_(y.mean((0, 1)), alpha=0.1)
    return y + net.codes.weight.detach().mean() + net.codes(torch.zeros(1, dtype=torch.long))


def twisted(net, x):
    weight = net.linear.weight
    return torch.tensordot(torch.einsum("bti,oi->bto", net.linear(x), weight), weight, dims=1)


def sample(net, x):
    mean, spread = net.mean(x), functional.softplus(net.spread(x))
    normal = torch.distributions.Normal(mean, spread, validate_args=True)
    prior = torch.distributions.Normal(torch.zeros(()), torch.ones(()))
    return normal.rsample(), torch.distributions.kl_divergence(normal, prior)


def algebra(net, x):
    matrix = torch.eye(WIDTH) + net.linear.weight @ net.linear.weight.T
    solved = torch.linalg.solve(matrix, net.linear(x).mT)
    factors = torch.linalg.cholesky(matrix), torch.linalg.qr(matrix)[0], torch.linalg.svdvals(x)
    return solved, torch.linalg.inv(matrix), torch.linalg.eigvalsh(matrix), *factors


def plain_attention(net, x):
    q = net.linear(x).unflatten(-1, (2, -1)).transpose(1, 2)
    with sdpa_kernel(SDPBackend.MATH):
        return functional.scaled_dot_product_attention(q, q, q)


def fold(net, x):
    pooled, places = functional.max_pool2d(net.conv(x), 2, return_indices=True)
    unfolded = functional.unfold(functional.max_unpool2d(pooled, places, 2), 2, stride=2)
    return functional.fold(unfolded, 8, 2, stride=2)


def resize(net, x):
    x = net.group(net.instance(net.slope(net.conv(x))))
    x = functional.interpolate(x, scale_factor=2, mode="bilinear")
    return functional.adaptive_avg_pool2d(functional.pixel_shuffle(x, 2), 3)


def warp(net, x):
    places = torch.eye(2, 3).expand(x.shape[0], -1, -1).to(x)
    grid = functional.affine_grid(places, list(x.shape), align_corners=False)
    return functional.grid_sample(net.conv(x), grid, align_corners=False)


def losses(net, x):
    y = net.linear(x)
    anchor, near, far = y[:, 0], y[:, 1], y[:, 2]
    return (
        functional.triplet_margin_loss(anchor, near, far),
        functional.cosine_embedding_loss(anchor, near, torch.ones(x.shape[0])),
        functional.binary_cross_entropy(y.sigmoid(), (x > 0).float()),
        functional.huber_loss(y, x),
        functional.kl_div(y.log_softmax(-1), x.softmax(-1), reduction="batchmean"),
        functional.cross_entropy(anchor, x[:, 0].argmax(-1), label_smoothing=0.1),
    )


def order(net, x):
    y = net.linear(x).cumsum(1).sort(-1)[0].topk(4, -1)[0].logcumsumexp(1)
    return y.prod(-1), functional.gumbel_softmax(net.linear(x), hard=True)


CASES = {
    "rnn": (parts(r=lambda: nn.RNN(WIDTH, WIDTH, 2)), lambda net, x: net.r(x)[0], sequences),
    "rnn both ways": (
        parts(r=lambda: nn.RNN(WIDTH, WIDTH, nonlinearity="relu", bidirectional=True)),
        lambda net, x: net.r(x)[0],
        sequences,
    ),
    "rnn cells": (parts(cell=lambda: nn.RNNCell(WIDTH, WIDTH)), over_steps, sequences),
    "gru cells": (parts(cell=lambda: nn.GRUCell(WIDTH, WIDTH)), over_steps, sequences),
    "lstm cells": (parts(cell=lambda: nn.LSTMCell(WIDTH, WIDTH)), lstm_over_steps, sequences),
    "bags": (
        parts(bag=lambda: nn.EmbeddingBag(32, WIDTH), linear=lambda: nn.Linear(WIDTH, 4)),
        lambda net, x: net.linear(net.bag(x)),
        words,
    ),
    "bags by offset": (
        parts(bag=lambda: nn.EmbeddingBag(32, WIDTH, mode="max"), out=lambda: nn.Linear(WIDTH, 4)),
        lambda net, x: net.out(net.bag(x.flatten(), torch.arange(0, x.numel(), 5))),
        words,
    ),
    "renormed embedding": (
        parts(
            embed=lambda: nn.Embedding(32, WIDTH, max_norm=1.0, padding_idx=0),
            linear=lambda: nn.Linear(WIDTH, 4),
        ),
        lambda net, x: net.linear(net.embed(x)),
        words,
    ),
    "volumes": (
        parts(conv=lambda: nn.Conv3d(3, 8, 3, padding=1), norm=lambda: nn.BatchNorm3d(8)),
        lambda net, x: functional.max_pool3d(net.norm(net.conv(x)), 2),
        volumes,
    ),
    "volumes up": (
        parts(conv=lambda: nn.ConvTranspose3d(3, 8, 2, 2)), lambda net, x: net.conv(x), volumes,
    ),
    "dilated": (
        parts(conv=lambda: nn.Conv1d(STEPS, 8, 3, dilation=2, padding="same")),
        lambda net, x: net.conv(x),
        sequences,
    ),
    "fourier": (
        square,
        lambda net, x: torch.fft.irfft(torch.fft.rfft(net.linear(x), dim=1), n=STEPS, dim=1),
        sequences,
    ),
    "complex": (
        lambda: square() | {"w": nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))},
        lambda net, x: torch.fft.fft(net.linear(x)) @ net.w,
        sequences,
    ),
    "rotary": (square, rotate, sequences),
    "spectrogram": (
        square,
        lambda net, x: torch.stft(
            net.linear(x).flatten(1), 16, window=torch.hann_window(16), return_complex=True
        ).abs(),
        sequences,
    ),
    "attention with weights": (
        parts(mha=lambda: nn.MultiheadAttention(WIDTH, 4, batch_first=True, dropout=0.1)),
        lambda net, x: net.mha(x, x, x)[0],
        sequences,
    ),
    "attention of other widths": (
        parts(mha=lambda: nn.MultiheadAttention(WIDTH, 4, kdim=8, vdim=4, batch_first=True)),
        lambda net, x: net.mha(x, x[..., :8], x[..., :4])[0],
        sequences,
    ),
    "attention written out": (square, plain_attention, sequences),
    "vmap": (
        square,
        lambda net, x: torch.func.vmap(lambda row: net.linear(row).tanh())(x),
        sequences,
    ),
    "ensemble": (square, ensemble, sequences),
    "forward derivative": (
        square, lambda net, x: torch.func.jvp(net.linear, (x,), (x,))[1], sequences,
    ),
    "reentrant checkpoint": (
        square,
        lambda net, x: checkpoint(
            lambda y: net.linear(net.linear(y).tanh()), net.linear(x), use_reentrant=True
        ),
        sequences,
    ),
    "checkpoint": (
        square,
        lambda net, x: checkpoint(
            lambda y: net.linear(net.linear(y).tanh()), net.linear(x), use_reentrant=False
        ),
        sequences,
    ),
    "checkpointed layers": (
        parts(layers=lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])),
        lambda net, x: checkpoint_sequential(net.layers, 2, x, use_reentrant=False),
        sequences,
    ),
    "algebra": (square, algebra, sequences),
    "quantized": (parts(linear=lambda: nn.Linear(WIDTH, 8), codes=lambda: nn.Embedding(8, 8)),
                  quantize, sequences),
    "order": (square, order, sequences),
    "warp": (parts(conv=lambda: nn.Conv2d(4, 4, 1)), warp, images),
    "resize": (
        parts(
            conv=lambda: nn.Conv2d(4, 12, 3),
            slope=nn.PReLU,
            instance=lambda: nn.InstanceNorm2d(12, affine=True),
            group=lambda: nn.GroupNorm(3, 12),
        ),
        resize,
        images,
    ),
    "fold": (parts(conv=lambda: nn.Conv2d(4, 8, 3, padding=1)), fold, images),
    "norms": (
        lambda: square()
        | {
            "plain": nn.BatchNorm1d(STEPS, momentum=None),
            "shared": nn.SyncBatchNorm(STEPS),
            "none": nn.BatchNorm1d(STEPS, track_running_stats=False),
        },
        lambda net, x: net.none(net.shared(net.plain(net.linear(x)))),
        sequences,
    ),
    "products": (square, twisted, sequences),
    "slices": (square, write_slices, sequences),
    "moving average": (lambda: square() | {"codes": nn.Embedding(4, WIDTH)}, moving_average,
                       sequences),
    "sampling": (pair, sample, sequences),
    "losses": (square, losses, sequences),
    "script": (
        lambda: {"linear": torch.jit.script(nn.Linear(WIDTH, WIDTH))},
        lambda net, x: net.linear(x),
        sequences,
    ),
    "compiled part": (
        square,
        lambda net, x: torch.compile(lambda y: net.linear(y).tanh(), backend="eager")(x),
        sequences,
    ),
    "lists of parameters": (
        lambda: {
            "weights": nn.ParameterList([nn.Parameter(torch.randn(16, 16)) for _ in range(3)]),
            "scales": nn.ParameterDict({"a": nn.Parameter(torch.ones(16))}),
        },
        lambda net, x: functools.reduce(torch.matmul, net.weights, x) * net.scales["a"],
        sequences,
    ),
    "hooks": (
        square,
        lambda net, x: (lambda y: (y.register_hook(lambda grad: grad * 2), y)[1])(net.linear(x)),
        sequences,
    ),
}  # fmt: skip


def trace(case, size=SIZE):
    make, run, batch = CASES[case] if isinstance(case, str) else case
    loaded = wrap(lambda: Model(make(), run), batch, mean_square)
    return trace_model(loaded, microbatch_size=size, dtype="float32")


def real_flop(case):
    make, run, batch = CASES[case]
    torch.manual_seed(0)
    model = Model(make(), run)
    inputs, targets = batch(SIZE)
    with FlopCounterMode(display=False) as counter:
        mean_square(model(inputs), targets).backward()
    return counter.get_total_flops()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("case", CASES)
def test_flop_of_forward_and_backward_are_those_of_a_real_run(case):
    graph = trace(case)
    assert graph.forward_flop + graph.backward_flop == real_flop(case)
    lost = [words for words in trace_warnings(graph) if "read by no operator" in words]
    assert lost == []


# Closed forms ------------------------------------------------------------------------------------

GATES = {nn.LSTM: 4, nn.GRU: 3}


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize(
    "options",
    [{}, {"num_layers": 2, "dropout": 0.1}, {"bidirectional": True}, {"batch_first": True}],
)
def test_recurrent_layers_are_one_kernel(kind, options):
    graph = trace(
        (parts(r=lambda: kind(WIDTH, WIDTH, **options)), lambda n, x: n.r(x)[0], sequences)
    )
    directions = 2 if options.get("bidirectional") else 1
    layers = options.get("num_layers", 1)
    gate = 2 * WIDTH * WIDTH
    assert graph.forward_flop == 2 * SIZE * STEPS * GATES[kind] * gate * directions * layers
    assert graph.backward_flop == 2 * graph.forward_flop
    assert len([op for op in graph.nodes if op.name == "_fused_rnn"]) == 1


def test_a_projected_state_is_narrower():
    make = parts(r=lambda: nn.LSTM(WIDTH, WIDTH, proj_size=4, batch_first=True))
    graph = trace((make, lambda net, x: net.r(x)[0], sequences))
    per_step = 4 * WIDTH * (WIDTH + 4) + 4 * WIDTH
    assert graph.forward_flop == 2 * SIZE * STEPS * per_step
    assert any(value.shape == (SIZE, STEPS, 4) for value in graph.values)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("batch_first", [True, False])
def test_packed_sequences_run_as_many_steps_as_they_have(kind, batch_first):
    lengths = [2, 6, 3]

    def run(net, x):
        source = x if batch_first else x.transpose(0, 1)
        packed = pack_padded_sequence(
            source, torch.tensor(lengths), batch_first=batch_first, enforce_sorted=False
        )
        assert packed.data.shape == (sum(lengths), WIDTH)
        assert packed.batch_sizes.tolist() == [3, 3, 2, 1, 1, 1]
        padded, again = pad_packed_sequence(net.r(packed)[0], batch_first=batch_first)
        assert again.tolist() == lengths
        assert padded.shape == source.shape
        return padded

    graph = trace((parts(r=lambda: kind(WIDTH, WIDTH, batch_first=batch_first)), run, sequences))
    gates = GATES.get(kind, 1)
    assert graph.forward_flop == 2 * sum(lengths) * gates * 2 * WIDTH * WIDTH


def test_packing_by_lengths_that_depend_on_weights_needs_a_hint():
    def run(net, x):
        lengths = net.linear(x).sum((1, 2)).long()
        return pack_padded_sequence(x, lengths, batch_first=True).data * net.linear.bias

    with pytest.raises(ModelError, match="pack_padded_sequence"):
        trace((square, run, sequences))


def test_a_gradient_inside_of_the_loss():
    def run(net, x):
        x = x.requires_grad_()
        energy = net.linear(x).tanh().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]

    graph = trace((square, run, sequences))
    product = 2 * SIZE * STEPS * WIDTH * WIDTH
    # Forward: x W and its derivative. Backward of the derivative: both factors; of x W: both.
    assert graph.forward_flop == 2 * product
    assert graph.backward_flop == 4 * product


def test_flex_attention_is_one_kernel_that_keeps_no_scores():
    def run(net, x):
        q = net.linear(x).unflatten(-1, (2, -1)).transpose(1, 2)
        documents = torch.arange(STEPS, device="cuda") // 2

        def same(batch, head, query, key):
            return (documents[query] == documents[key]) & (query >= key)

        mask = flex_attention.create_block_mask(same, None, None, STEPS, STEPS, device="cuda")
        return flex_attention.flex_attention(q, q, q, block_mask=mask)

    graph = trace((square, run, sequences))
    attention = [op for op in graph.nodes if "attention" in op.name]
    assert [op.phase for op in attention] == [Phase.FORWARD, Phase.BACKWARD]
    assert attention[0].flop == 2 * SIZE * 2 * STEPS * STEPS * (8 + 8)
    (note,) = graph.notes
    assert "its block mask and its changes of scores are left out" in note
    with pytest.raises(ValueError, match="meta"):
        flex_attention.flex_attention(*[torch.empty(1, 1, 8, 8, device="meta")] * 3)


# What is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "words", "hint"),
    [
        (
            lambda net, x: net.linear(x).relu_().mul_(2).sum(),
            "changes a tensor in place that backward needs",
            "x = x + y",
        ),
        (
            lambda net, x: torch.func.grad(lambda y: net.linear(y).sum())(x),
            "torch.func",
            "torch.autograd.grad",
        ),
        (
            lambda net, x: torch.cond(torch.tensor(True), net.linear, net.linear, (x,)),
            "operator cond takes functions",
            "in Python",
        ),
        (
            lambda net, x: torch.nested.nested_tensor([x[0], x[1]]),
            "nested",
            "padded",
        ),
        (
            lambda net, x: functional.multi_margin_loss(net.linear(x[:, 0]), x[:, 0].argmax(-1)),
            "multi_margin_loss_backward has no kernel for tensors without data",
            "register_fake",
        ),
        (
            lambda net, x: functional.embedding(x[..., 0].long(), net.linear.weight, sparse=True),
            "parse",
            "dense",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_traced_says_what_could(run, words, hint):
    with pytest.raises(ModelError) as error:
        trace((square, run, sequences))
    assert words in str(error.value)
    assert hint in error.value.hint
