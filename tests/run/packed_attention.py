"""Attention of ``torch.nn``: queries, keys and values in one weight, a projection never called.

The first asks for the weights of its attention and drops them; the second takes its queries from
elsewhere, so that the weight comes apart in pieces of two sizes.
"""

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, LENGTH = 64, 32, 4, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first_norm, self.second_norm, self.third_norm = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.crossing = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.first_norm(x)
        x = x + self.attention(y, y, y)[0]
        y = self.second_norm(x)
        x = x + self.crossing(y, x, x, need_weights=False)[0]
        return x + self.down(functional.gelu(self.up(self.third_norm(x))))


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
