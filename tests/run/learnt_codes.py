"""Blocks with batch statistics, and between them a codebook without parameters that moves."""

import torch
from torch import nn
from torch.nn import functional

TOKENS, WIDTH, CODES = 5, 8, 12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(TOKENS)

    def forward(self, x):
        return x + functional.gelu(self.norm(self.layer(x)))


class Codes(nn.Module):
    """Rounds to the nearest code, which moves towards what was rounded to it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(CODES, WIDTH))

    def forward(self, x):
        nearest = torch.cdist(x, self.codes).argmin(-1)
        rounded = self.codes[nearest]
        with torch.no_grad():
            members = functional.one_hot(nearest, CODES).to(x.dtype).flatten(0, 1)
            means = members.T @ x.flatten(0, 1) / members.sum(0).clamp(min=1)[:, None]
            self.codes.lerp_(means, 0.3 * (members.sum(0) > 0).to(x.dtype)[:, None])
        return x + (rounded - x).detach(), functional.mse_loss(x, rounded)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(3))
        self.quantizer = Codes()
        self.decoder = nn.ModuleList(Block() for _ in range(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.steps += 1
        hidden = x
        for block in self.encoder:
            hidden = block(hidden)
        hidden, commitment = self.quantizer(hidden)
        for block in self.decoder:
            hidden = block(hidden)
        return functional.mse_loss(hidden, x) + commitment


def build_model():
    return Model()


def example_batch(microbatch_size):
    return torch.randn(microbatch_size, TOKENS, WIDTH), None
