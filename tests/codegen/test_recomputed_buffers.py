"""Buffers that a forward changes: once for each microbatch, also where blocks run again."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from planner.runtime.recompute import recompute_activations


class Block(nn.Module):
    """Normalises by the batch, and by a scale that it has kept from batches before."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        scaled = self.first(x) / self.scale.clone()
        with torch.no_grad():
            self.scale.mul_(0.5).add_(scaled.square().mean().sqrt(), alpha=0.5)
        return x + self.norm(scaled).tanh()


def trained(mode):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).double()
    model[0].register_buffer("scale", torch.tensor(3.0, dtype=torch.float64))
    names = [name for name, _ in model.named_buffers()]
    part = SimpleNamespace(block_items=lambda: list(model.named_children()))
    recompute_activations(part, [mode, mode], names)
    for batch in torch.randn(3, 8, 4, dtype=torch.float64):
        model(batch).square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return dict(model.named_buffers()), gradients


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_block_that_runs_again_reads_and_changes_buffers_as_if_it_ran_once(mode):
    buffers, gradients = trained("none")
    found_buffers, found_gradients = trained(mode)
    for name, expected in buffers.items():
        torch.testing.assert_close(found_buffers[name], expected, rtol=1e-12, atol=0)
    for name, expected in gradients.items():
        torch.testing.assert_close(found_gradients[name], expected, rtol=1e-10, atol=1e-12)
