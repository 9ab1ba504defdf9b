"""A model whose hooks keep what lies inside of blocks, for a penalty that the model returns."""

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(32, 64)
        self.kept = []
        for block in self.blocks:
            block.up.register_forward_hook(lambda _, __, output: self.kept.append(output))

    def forward(self, tokens):
        self.kept.clear()
        stream = self.embedding(tokens)
        for block in self.blocks:
            stream = block(stream)
        return self.head(stream), sum(each.square().mean() for each in self.kept)


def build_model():
    return Model()


def example_batch(size):
    tokens = torch.randint(0, 64, (size, 9))
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(output, targets):
    logits, penalty = output
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 0.01 * penalty
