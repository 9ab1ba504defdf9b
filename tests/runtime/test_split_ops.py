"""Ops on parts of tensors leave the parts of what they leave of the whole."""

import pytest
import torch

from planner.runtime import split_ops  # noqa: F401 - says how ops run on split tensors
from planner.runtime.layout import shard
from planner.runtime.split_tensor import Ranks, SplitTensor, changed, unwrapped, wrapped

TP = 2


def gradient(compute, tensor):
    leaf = tensor.detach().clone().requires_grad_()
    compute(leaf).backward(torch.ones(()))
    return leaf.grad


def parts_of(tensor, layout):
    return [Ranks(rank=i, size=TP, group=None).part(tensor, layout).clone() for i in range(TP)]


def gradients_of_parts(compute, tensor, layout):
    """Gradient of each rank's part, where the results of the parts add up to that of the whole."""
    found = []
    for rank, part in enumerate(parts_of(tensor, layout)):
        leaf = part.requires_grad_()
        result = compute(wrapped(leaf, layout, Ranks(rank=rank, size=TP, group=None)))
        assert isinstance(result, SplitTensor)
        unwrapped(result).sum().backward()
        found.append(leaf.grad)
    return found


@pytest.mark.parametrize("used", [(0, 1), (1, 2), (0,)])
def test_pieces_without_gradient_are_zeros(used):
    """Query, key and value in one tensor, of which not all are used."""
    x = torch.randn(2, 4, 12, dtype=torch.float64)
    layout = shard(2, 3)

    def pieces(whole):
        split = whole.split(4, dim=2)
        return sum(split[i] ** 2 for i in used)

    whole = gradient(lambda each: pieces(each).sum(), x)
    found = gradients_of_parts(pieces, x, layout)
    for part, expected in zip(found, parts_of(whole, layout), strict=True):
        torch.testing.assert_close(part, expected)


def test_constants_are_cut_as_samples_and_heads_in_one_dim_are():
    """A mask over (samples x heads, tokens), of which a rank has some heads of each sample."""
    x, mask = torch.randn(6 * 4, 5, dtype=torch.float64), torch.randn(6 * 4, 5)
    layout = shard(0, 6)
    whole = gradient(lambda each: (each * mask).sum(), x)
    found = gradients_of_parts(lambda each: each * mask, x, layout)
    for part, expected in zip(found, parts_of(whole, layout), strict=True):
        torch.testing.assert_close(part, expected)


@pytest.mark.parametrize("samples", [1, 2])
def test_a_part_of_a_whole_tensor_keeps_no_more_than_itself(samples):
    """One sample's rows lie side by side, so that a view of some of them would be contiguous."""
    whole = torch.randn(samples, 8, 4)
    part = changed(whole, shard(1), Ranks(rank=1, size=TP, group=None))
    local = unwrapped(part)
    assert local.untyped_storage().nbytes() == whole.untyped_storage().nbytes() // TP
    assert torch.equal(local, whole[:, 4:])


ACTIVATIONS = {
    name: getattr(torch.nn.functional, name)
    for name in (
        *("celu", "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh"),
        *("leaky_relu", "logsigmoid", "mish", "relu", "relu6", "selu", "silu", "softplus"),
        *("softshrink", "softsign", "tanh", "tanhshrink"),
    )
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_run_on_parts_forward_and_backward(name):
    """Kernels of a device, which a run without data may not meet."""
    x, layout = torch.randn(2, 3, 8, dtype=torch.float64), shard(2)
    activation = ACTIVATIONS[name]
    whole = gradient(lambda each: activation(each).sum(), x)
    found = gradients_of_parts(activation, x, layout)
    for part, expected in zip(found, parts_of(whole, layout), strict=True):
        torch.testing.assert_close(part, expected)
