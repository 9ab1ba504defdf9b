"""Ops on parts of tensors leave the parts of what they leave of the whole."""

import pytest
import torch

from planner.runtime import split_ops  # noqa: F401 - says how ops run on split tensors
from planner.runtime.layout import REPLICATE, shard
from planner.runtime.split_tensor import (
    Ranks,
    SplitTensor,
    changed,
    layout_of,
    unwrapped,
    wrapped,
)
from planner.runtime.unread import SplitError

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


def over(rank, *, size=TP, level=0):
    return Ranks(rank=rank, size=size, group=None, level=level)


@pytest.mark.parametrize("cp_rank", [0, 1])
@pytest.mark.parametrize("tp_rank", [0, 1])
def test_what_a_rank_of_cp_has_is_split_in_turn(cp_rank, tp_rank):
    whole = torch.randn(3, 8, 4)
    outer, inner = over(cp_rank, level=1), over(tp_rank)
    of_cp = changed(whole, shard(1), outer)
    both = changed(of_cp, shard(1), inner)
    assert both.shape == whole.shape
    assert (layout_of(both, outer), layout_of(both, inner)) == (shard(1), shard(1))
    first = 4 * cp_rank + 2 * tp_rank
    assert torch.equal(unwrapped(unwrapped(both)), whole[:, first : first + 2])
    # Ops run over the outer ranks, and on their parts over the inner ones.
    doubled = both.transpose(1, 2) * 2
    assert (layout_of(doubled, outer), layout_of(doubled, inner)) == (shard(2), shard(2))
    expected = whole[:, first : first + 2].transpose(1, 2) * 2
    assert torch.equal(unwrapped(unwrapped(doubled)), expected)


@pytest.mark.parametrize("cp_rank", [0, 1])
@pytest.mark.parametrize("tp_rank", [0, 1])
def test_heads_that_tp_leaves_are_split_over_cp(cp_rank, tp_rank):
    """Each rank of cp has some of the heads of each of tp: pieces that are split, side by side."""
    whole = torch.randn(2, 8, 6, 4)
    outer, inner = over(cp_rank, level=1), over(tp_rank)
    heads = changed(changed(whole, shard(1), inner), shard(1, TP), outer)
    first = 4 * tp_rank + 2 * cp_rank
    assert torch.equal(unwrapped(unwrapped(heads)), whole[:, first : first + 2])


def test_parts_inside_are_made_whole_before_those_around_them():
    """Joined over cp, what tp has of each part would not lie in order."""
    both = changed(changed(torch.randn(2, 8, 4), shard(1), over(0, level=1)), shard(1), over(0))
    with pytest.raises(SplitError, match="would not lie in order"):
        changed(both, REPLICATE, over(0, level=1))
    with pytest.raises(SplitError, match="would not lie in order"):
        changed(changed(torch.randn(2, 8, 4), shard(1), over(0)), shard(1), over(0, level=1))


def test_what_cannot_run_inside_a_part_is_refused_where_it_is_read():
    whole = torch.randn(2, 8, 4)
    both = changed(changed(whole, shard(1), over(0, level=1)), shard(2), over(0))
    unread = both.cumsum(2)
    with pytest.raises(SplitError, match="cumsum"):
        unread + 1
