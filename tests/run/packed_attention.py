"""Layers of ``torch.nn`` as they are: one weight for queries, keys and values, and a projection
whose module is never called."""

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, WIDTH, LENGTH = 64, 32, 16


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(4)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(
            tokens.shape[1], device=x.device, dtype=x.dtype
        )
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


def build_model():
    return Model()


def example_batch(batch_size):
    tokens = torch.randint(0, VOCABULARY, (batch_size, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(outputs, targets):
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
