"""Grouped queries, whose attention repeats keys and values: fewer heads of them than ranks.

Every other block has one head for all queries and a mask of its own; its queries are normed.
"""

import torch
from packed_attention import VOCABULARY, WIDTH, example_batch, loss_fn
from torch import nn
from torch.nn import functional

__all__ = ["build_model", "example_batch", "loss_fn"]

HEADS = 8


class Block(nn.Module):
    def __init__(self, groups, *, is_masked):
        super().__init__()
        self.groups, self.is_masked = groups, is_masked
        self.norm, self.up_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        size = WIDTH // HEADS
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, groups * size)
        self.value, self.out = nn.Linear(WIDTH, groups * size), nn.Linear(WIDTH, WIDTH)
        self.query_norm = nn.RMSNorm(size)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        y = self.norm(x)
        q = self.query_norm(self.query(y).view(batch, length, HEADS, -1)).transpose(1, 2)
        k = self.key(y).view(batch, length, self.groups, -1).transpose(1, 2)
        v = self.value(y).view(batch, length, self.groups, -1).transpose(1, 2)
        mask = None
        if self.is_masked:
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril().triu(-4)
        attended = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(functional.gelu(self.up(self.up_norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        blocks = [Block(2, is_masked=False), Block(1, is_masked=True)]
        self.blocks = nn.ModuleList([*blocks, Block(2, is_masked=False), Block(1, is_masked=True)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build_model():
    return Model()
