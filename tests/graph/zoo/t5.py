"""A T5-like encoder-decoder: each half computes its relative position bias once, for all blocks.

The bias needs a gradient, and the encoder's output goes to every block of the decoder.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 128


class PositionBias(nn.Module):
    """One number per head and bucket of distance, (1, heads, queries, keys)."""

    def __init__(self, heads: int, buckets: int = 32, far: int = 128):
        super().__init__()
        self.table = nn.Embedding(buckets, heads)
        self.buckets, self.far = buckets, far

    def forward(self, length: int, device: torch.device) -> Tensor:
        places = torch.arange(length, device=device)
        distance = places[None, :] - places[:, None]
        half = self.buckets // 2
        bucket = (distance > 0).long() * half
        distance = distance.abs()
        exact = half // 2
        logarithm = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.far / exact)
        coarse = (exact + logarithm * (half - exact)).long().clamp(max=half - 1)
        bucket = bucket + torch.where(distance < exact, distance, coarse)
        return self.table(bucket).permute(2, 0, 1).unsqueeze(0)


class Attention(nn.Module):
    """Attention without scaling; its scores get a bias where there is one."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor, source: Tensor, bias: Tensor | None) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(source)), self.split(self.v(source))
        scores = q @ k.transpose(-2, -1)
        if bias is not None:
            scores = scores + bias
        weights = torch.softmax(scores.float(), dim=-1).type_as(scores)
        return self.o((weights @ v).transpose(1, 2).reshape(x.shape))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.wi = nn.Linear(dim, hidden, bias=False)
        self.wo = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(F.relu(self.wi(x)))


class EncoderBlock(nn.Module):
    def __init__(self, dim: int, heads: int, hidden: int):
        super().__init__()
        self.norm1 = nn.RMSNorm(dim, eps=1e-6)
        self.attention = Attention(dim, heads)
        self.norm2 = nn.RMSNorm(dim, eps=1e-6)
        self.ff = FeedForward(dim, hidden)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, bias)
        return x + self.ff(self.norm2(x))


class DecoderBlock(nn.Module):
    def __init__(self, dim: int, heads: int, hidden: int):
        super().__init__()
        self.norm1 = nn.RMSNorm(dim, eps=1e-6)
        self.attention = Attention(dim, heads)
        self.norm2 = nn.RMSNorm(dim, eps=1e-6)
        self.cross = Attention(dim, heads)
        self.norm3 = nn.RMSNorm(dim, eps=1e-6)
        self.ff = FeedForward(dim, hidden)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, bias)
        x = x + self.cross(self.norm2(x), memory, None)
        return x + self.ff(self.norm3(x))


class T5(nn.Module):
    def __init__(self, vocabulary: int, dim: int, layers: int, heads: int, hidden: int):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.encoder_bias = PositionBias(heads)
        self.encoder = nn.ModuleList([EncoderBlock(dim, heads, hidden) for _ in range(layers)])
        self.encoder_norm = nn.RMSNorm(dim, eps=1e-6)
        self.decoder_bias = PositionBias(heads)
        self.decoder = nn.ModuleList([DecoderBlock(dim, heads, hidden) for _ in range(layers)])
        self.decoder_norm = nn.RMSNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.embed(source)
        bias = self.encoder_bias(source.shape[1], source.device)
        for block in self.encoder:
            memory = block(memory, bias)
        memory = self.encoder_norm(memory)
        x = self.embed(target)
        length = target.shape[1]
        hidden = torch.full((length, length), float("-inf"), device=x.device, dtype=x.dtype)
        bias = self.decoder_bias(length, target.device) + hidden.triu(1)
        for block in self.decoder:
            x = block(x, bias, memory)
        return self.head(self.decoder_norm(x))


def build_model() -> nn.Module:
    """A small model that trains in seconds on a CPU."""
    return T5(VOCABULARY, dim=64, layers=3, heads=4, hidden=128)


def t5_3b() -> nn.Module:
    """About the size of T5-3B (its heads there are wider than dim / heads); seq_len=512."""
    return T5(32128, dim=2048, layers=24, heads=32, hidden=10240)


def example_batch(microbatch_size: int, seq_len: int = 32) -> tuple[tuple[Tensor, Tensor], Tensor]:
    source = torch.randint(0, VOCABULARY, (microbatch_size, seq_len))
    target = torch.randint(0, VOCABULARY, (microbatch_size, seq_len // 2 + 1))
    return (source, target[:, :-1].contiguous()), target[:, 1:].contiguous()


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
