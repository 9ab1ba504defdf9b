"""Inputs of blocks in host memory: what lies there, and that nothing else changes."""

import pytest
import torch
from torch import nn

from planner.runtime import host_inputs
from planner.runtime.host_inputs import inputs_on_host
from planner.runtime.recompute import recompute_activations


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, *, scale, beside=None):
        return torch.tanh(self.linear(x) * scale) + (0 if beside is None else beside)


class Part:
    """What of a part is asked for."""

    def __init__(self, blocks):
        self.blocks = blocks

    def block_items(self):
        return [(str(i), block) for i, block in enumerate(self.blocks)]


def trained(modes, keep):
    """Gradients of two blocks, the second of which gets its stream by name."""
    torch.manual_seed(0)
    blocks = [Block(), Block()]
    recompute_activations(Part(blocks), modes, keep=keep)
    x, scale = torch.randn(4, 8, requires_grad=True), torch.full((8,), 2.0)
    made = blocks[0](x * 1.0, scale=scale)
    blocks[1](torch.ones(4, 8), scale=scale, beside=made).square().sum().backward()
    return [x.grad, *(p.grad for block in blocks for p in block.parameters())]


@pytest.fixture
def copied(monkeypatch):
    """Shapes of what was copied to the host."""
    shapes, own = [], host_inputs.on_host
    monkeypatch.setattr(
        host_inputs, "on_host", lambda tensor: shapes.append(tuple(tensor.shape)) or own(tensor)
    )
    return shapes


def test_what_needs_a_gradient_is_copied_however_it_is_given(copied):
    expected = trained(("none", "none"), None)
    assert not copied
    found = trained(("full", "full"), inputs_on_host)
    assert copied == [(4, 8)] * 2
    assert all(map(torch.equal, found, expected))


def test_blocks_that_keep_more_than_their_input_keep_it_where_it_is(copied):
    expected = trained(("none", "selective"), None)
    assert all(map(torch.equal, trained(("none", "selective"), inputs_on_host), expected))
    assert not copied


def test_nothing_is_copied_without_gradients(copied):
    block = Block()
    recompute_activations(Part([block]), ("full",), keep=inputs_on_host)
    with torch.no_grad():
        block(torch.randn(4, 8), scale=torch.ones(8))
    assert not copied
