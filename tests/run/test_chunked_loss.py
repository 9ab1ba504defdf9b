"""A loss in chunks of rows: equal to torch's, whatever stands between the logits and the loss."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from planner.runtime.chunked_loss import take_loss_in_chunks
from planner.runtime.part import Part
from planner.runtime.processes import RunError

CLASSES = 50
CODES = {
    "as they are": lambda y: y.view(-1, CLASSES),
    "flattened": lambda y: y.flatten(0, 1).contiguous(),
    "capped": lambda y: (torch.tanh(y / 5.0) * 5.0).reshape(-1, CLASSES),
    "in another dtype": lambda y: y.to(torch.float32).view(-1, y.size(-1)).double(),
    "scaled, on its device": lambda y: y.to(y.device).mul(0.5).unsqueeze(0).flatten(0, -2),
}


class Model(nn.Module):
    def __init__(self, *, bias):
        super().__init__()
        self.table = nn.Embedding(CLASSES, 16)
        self.inner = nn.Linear(16, 16)
        self.head = nn.Linear(16, CLASSES, bias=bias)

    def forward(self, ids):
        return self.head(self.inner(self.table(ids)).tanh())


def pair(*, bias=False, chunks=3):
    """The same model with a whole loss and with one in chunks."""
    torch.manual_seed(0)
    whole = Model(bias=bias).double()
    chunked = copy.deepcopy(whole)
    part = Part(chunked, SimpleNamespace(), blocks=())
    take_loss_in_chunks(part, "head", chunks)
    return whole, chunked


def batch():
    generator = torch.Generator().manual_seed(1)
    ids, targets = torch.randint(0, CLASSES, (2, 4, 7), generator=generator)
    targets[0, :3] = -100
    return ids, targets


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"ignore_index": 7}])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("code", CODES)
def test_loss_and_gradients_are_those_of_whole_logits(code, bias, options):
    ids, targets = batch()
    if options.get("ignore_index"):
        targets[targets < 0] = 7
    losses = []
    for model in (models := pair(bias=bias)):
        logits = CODES[code](model(ids))
        loss = functional.cross_entropy(logits, targets.view(-1), **options)
        (loss * 0.25).backward()
        losses.append(loss.detach())
    exact = {"rtol": 1e-6, "atol": 1e-7} if "dtype" in code else {"rtol": 1e-12, "atol": 1e-14}
    torch.testing.assert_close(losses[1], losses[0], **exact)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(other.grad, one.grad, **exact)


@pytest.mark.parametrize("chunks", [1, 5, 28, 100])
def test_any_number_of_chunks_gives_the_same(chunks):
    ids, targets = batch()
    whole, chunked = pair(chunks=chunks)
    losses = [
        functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        for model in (whole, chunked)
    ]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)


def test_a_frozen_table_gets_no_gradient():
    ids, targets = batch()
    whole, chunked = pair()
    for model in (whole, chunked):
        model.head.weight.requires_grad_(False)
        functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten()).backward()
    assert chunked.head.weight.grad is None
    torch.testing.assert_close(chunked.inner.weight.grad, whole.inner.weight.grad)


def test_logits_never_lie_whole():
    ids, targets = batch()
    _, chunked = pair(chunks=7)
    seen = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and not made.is_meta:
                seen.extend([made.shape[0]] if made.shape[1:] == (CLASSES,) else [])
            return made

    with Sizes():
        loss = functional.cross_entropy(chunked(ids).flatten(0, 1), targets.flatten())
    loss.backward()
    assert set(seen) == {4, 16}  # rows of a chunk, and the table the other way round


def test_without_gradients_logits_are_what_they_look_like():
    ids, _ = batch()
    whole, chunked = pair()
    with torch.no_grad():
        expected, found = whole(ids), chunked(ids)
        assert found.shape == expected.shape
        torch.testing.assert_close(found.softmax(-1), expected.softmax(-1))
        torch.testing.assert_close((found * 2)[:, -1].argmax(-1), expected[:, -1].argmax(-1))


@pytest.mark.parametrize(
    "code",
    [
        lambda y, t: functional.cross_entropy(y[:, :-1].flatten(0, 1), t[:, 1:].flatten()),
        lambda y, t: functional.cross_entropy(y.transpose(1, 2), t),
        lambda y, t: functional.cross_entropy(y.flatten(0, 1), t.flatten(), label_smoothing=0.1),
        lambda y, t: y.logsumexp(-1).square().mean(),
        lambda y, t: functional.cross_entropy(y.mul_(2).flatten(0, 1), t.flatten()),
        lambda y, t: (y + torch.ones(CLASSES)).sum(),
    ],
)
def test_what_needs_all_logits_is_refused(code):
    ids, targets = batch()
    _, chunked = pair()
    with pytest.raises(RunError, match=r"3 chunks of rows, and \w+ needs all logits"):
        code(chunked(ids), targets.clamp(min=0))


def test_another_module_than_a_linear_one_is_refused():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    model = nn.Sequential(Own(4, 4))
    with pytest.raises(RunError, match=r"0 is no torch.nn.Linear"):
        take_loss_in_chunks(Part(model, SimpleNamespace(), blocks=()), "0", 2)
