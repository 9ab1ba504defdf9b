"""Weights in parts, length and direction: by a hook of torch, and by a parametrization."""

import warnings

import torch
from torch import nn
from torch.nn.utils import parametrizations

DIM, VOCAB = 16, 32


def hooked(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


class Block(nn.Module):
    def __init__(self, normed):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = normed(nn.Linear(DIM, 4 * DIM))
        self.down = normed(nn.Linear(4 * DIM, DIM))

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).tanh())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        kinds = (hooked, hooked, parametrizations.weight_norm, parametrizations.weight_norm)
        self.blocks = nn.ModuleList(Block(kind) for kind in kinds)
        self.embed = nn.Embedding(VOCAB, DIM)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build_model():
    return Model()


def example_batch(microbatch_size):
    tokens = torch.randint(0, VOCAB, (microbatch_size, 9))
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(output, targets):
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.reshape(-1))
