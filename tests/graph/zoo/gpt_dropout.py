"""A GPT-2 with attention written out and dropout everywhere, as before fused kernels."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 128


class EagerAttention(nn.Module):
    """Causal attention with its score matrix in memory."""

    def __init__(self, dim: int, heads: int, dropout: float, max_length: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.score_dropout = nn.Dropout(dropout)
        self.dropout = nn.Dropout(dropout)
        hidden = torch.ones(max_length, max_length, dtype=torch.bool).triu(1)
        self.register_buffer("hidden", hidden, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        size, length, dim = x.shape
        q, k, v = (
            part.view(size, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).split(dim, dim=2)
        )
        scores = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(k.shape[-1]))
        scores = scores.masked_fill(self.hidden[:length, :length], float("-inf"))
        out = self.score_dropout(torch.softmax(scores, dim=-1)) @ v
        return self.dropout(self.proj(out.transpose(1, 2).reshape(size, length, dim)))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float, max_length: int):
        super().__init__()
        self.ln_1 = nn.LayerNorm(dim)
        self.attn = EagerAttention(dim, heads, dropout, max_length)
        self.ln_2 = nn.LayerNorm(dim)
        self.fc = nn.Linear(dim, 4 * dim)
        self.proj = nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.dropout(self.proj(F.gelu(self.fc(self.ln_2(x)))))


class GPT(nn.Module):
    def __init__(
        self, vocabulary: int, dim: int, layers: int, heads: int, dropout: float, max_length: int
    ):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Embedding(max_length, dim)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList([Block(dim, heads, dropout, max_length) for _ in range(layers)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_model() -> nn.Module:
    """A small model that trains in seconds on a CPU."""
    return GPT(VOCABULARY, dim=64, layers=4, heads=4, dropout=0.1, max_length=64)


def gpt_medium() -> nn.Module:
    """GPT-2 medium; give seq_len=1024."""
    return GPT(50304, dim=1024, layers=24, heads=16, dropout=0.1, max_length=1024)


def example_batch(microbatch_size: int, seq_len: int = 32) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (microbatch_size, seq_len + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
