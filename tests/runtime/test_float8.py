"""Linear layers in float8 beside products of what they round, taken in float32."""

import copy

import pytest
import torch
from torch import nn

from planner.runtime.float8 import (
    GRADIENTS,
    VALUES,
    Float8Linear,
    multiplies_in_float8,
    multiply_in_float8,
)

LARGEST = {VALUES: 2.0**8, GRADIENTS: 2.0**15}


def rounded(tensor, dtype):
    """A tensor rounded to float8 by the largest power of two that keeps it in range."""
    largest = tensor.float().abs().max()
    scale = 1.0
    while largest * scale * 2 <= LARGEST[dtype]:
        scale *= 2
    while largest * scale >= LARGEST[dtype]:
        scale /= 2
    return (tensor.float() * scale).to(dtype).float() / scale


def layer_of(features=64, out=48, *, bias=True):
    torch.manual_seed(0)
    layer = nn.Linear(features, out, bias=bias, dtype=torch.bfloat16)
    layer.__class__ = Float8Linear
    return layer


@pytest.mark.parametrize("rows", [1, 5, 16, 33])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])
def test_each_product_is_that_of_what_it_rounds(rows, bias, size):
    layer = layer_of(bias=bias)
    x = (size * torch.randn(rows, 64)).bfloat16().requires_grad_()
    sent = torch.randn(rows, 48).bfloat16() / size
    result = layer(x)
    result.backward(sent)
    values, weight, grad = (
        rounded(x, VALUES),
        rounded(layer.weight, VALUES),
        rounded(sent, GRADIENTS),
    )
    expected = (values @ weight.t()).bfloat16()
    expected = expected + layer.bias if bias else expected
    close = {"rtol": 2e-2, "atol": 1e-3}  # sums of bfloat16 in another order
    scale = expected.abs().max()
    torch.testing.assert_close(result / scale, expected / scale, **close)
    for found, wanted in ((x.grad, grad @ weight), (layer.weight.grad, grad.t() @ values)):
        largest = wanted.abs().max()
        torch.testing.assert_close(found.float() / largest, wanted / largest, **close)


def test_what_float8_holds_is_exact():
    layer, exact = layer_of(), nn.Linear(64, 48, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randint(-4, 5, parameter.shape) / 4)
    exact.load_state_dict(layer.state_dict())
    x = torch.randint(-2, 3, (2, 16, 64)).bfloat16()
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    results = [each(value) for each, value in zip((layer, exact), inputs, strict=True)]
    assert torch.equal(*results)
    for result in results:
        result.backward(torch.ones_like(result))
    assert torch.equal(*(value.grad for value in inputs))
    assert torch.equal(layer.weight.grad, exact.weight.grad)


def test_of_nothing_and_of_next_to_nothing_gradients_are_finite():
    layer = layer_of()
    layer(torch.empty(0, 64, dtype=torch.bfloat16)).sum().backward()
    assert not layer.weight.grad.any()
    x = torch.randn(16, 64).bfloat16()
    for factor in (0.0, 1e-37):
        (layer(x) * factor).sum().backward()
        assert layer.weight.grad.isfinite().all()


def test_gradients_that_are_not_finite_stay_so():
    layer = layer_of()
    (layer(torch.randn(16, 64).bfloat16()) * float("inf")).sum().backward()
    assert not layer.weight.grad.isfinite().all()


class Own(nn.Linear):
    """Has a forward of its own."""


@pytest.mark.parametrize(
    ("module", "takes"),
    [
        (nn.Linear(32, 16), True),
        (nn.Linear(32, 17), False),
        (nn.Linear(30, 16), False),
        (Own(32, 16), False),
        (nn.Embedding(32, 16), False),
    ],
)
def test_plain_linear_layers_of_whole_rows_alone(module, takes):
    assert multiplies_in_float8(module) is takes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_blocks_alone_multiply_in_float8_beside_bfloat16(dtype):
    model = nn.Sequential(nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32)), nn.Linear(32, 32))
    names = list(copy.deepcopy(model).state_dict())
    multiply_in_float8(model, ["1"], dtype)
    changed = [name for name, each in model.named_modules() if isinstance(each, Float8Linear)]
    assert changed == (["1.0"] if dtype is torch.bfloat16 else [])
    assert list(model.state_dict()) == names
