"""A model whose blocks multiply with weights of their own: experts that all tokens go to."""

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, WIDTH, INNER, EXPERTS, LENGTH = 64, 32, 48, 4, 16


class Experts(nn.Module):
    """Gate and up side by side in one weight; a bias that is added to what all of them give."""

    def __init__(self):
        super().__init__()
        self.into = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * INNER) / WIDTH**0.5)
        self.out_of = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / INNER**0.5)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x, gates):
        tokens = x.flatten(0, 1).expand(EXPERTS, -1, -1)
        gate, up = torch.bmm(tokens, self.into).chunk(2, dim=-1)
        each = torch.bmm(functional.silu(gate) * up, self.out_of)
        mixed = (each * gates.flatten(0, 1).t().unsqueeze(-1)).sum(0)
        return (mixed + self.bias).view_as(x)


class Perceptron(nn.Module):
    """Two products of one module."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(WIDTH, INNER) / WIDTH**0.5)
        self.second = nn.Parameter(torch.randn(WIDTH, INNER) / INNER**0.5)

    def forward(self, x):
        return functional.gelu(x @ self.first) @ self.second.t()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts()
        self.perceptron = Perceptron()

    def forward(self, x):
        y = self.norm(x)
        x = x + self.experts(y, self.router(y).softmax(-1))
        return x + self.perceptron(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build_model():
    return Model()


def example_batch(batch_size):
    tokens = torch.randint(0, VOCABULARY, (batch_size, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(outputs, targets):
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
