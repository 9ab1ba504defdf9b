"""A model whose blocks are single layers, of torch and with weights of their own."""

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, WIDTH, INNER, LENGTH = 64, 32, 128, 16


class Perceptron(nn.Module):
    """Two products of one module."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(WIDTH, INNER) / WIDTH**0.5)
        self.second = nn.Parameter(torch.randn(WIDTH, INNER) / INNER**0.5)

    def forward(self, x):
        return functional.gelu(x @ self.first) @ self.second.t()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layers = []
        for _ in range(3):
            layers += [nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)]
            layers += [Perceptron(), nn.LayerNorm(WIDTH)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.layers(self.embed(tokens)))


def build_model():
    return Model()


def example_batch(microbatch_size):
    tokens = torch.randint(0, VOCABULARY, (microbatch_size, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(logits, targets):
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
