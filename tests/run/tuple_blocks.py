"""A model whose blocks return tuples, as T5's do: the first makes a bias that all others read.

The conditioning and the embeddings are changed in place outside of the blocks.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 64
LENGTH = 12


class Block(nn.Module):
    """Attention with a bias on its scores, scaled by the conditioning."""

    def __init__(self, dim: int, heads: int, *, makes_bias: bool):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.relative = nn.Embedding(2 * LENGTH, heads) if makes_bias else None

    def bias(self, length: int, device: torch.device) -> Tensor:
        places = torch.arange(length, device=device)
        return self.relative(places[None] - places[:, None] + LENGTH).permute(2, 0, 1)[None]

    def forward(
        self, x: Tensor, bias: Tensor | None, condition: Tensor
    ) -> tuple[Tensor, None, Tensor]:
        size, length, _ = x.shape
        bias = self.bias(length, x.device) if bias is None else bias
        q, k, v = self.qkv(self.norm(x)).view(size, length, 3, self.heads, -1).unbind(2)
        scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) + bias
        mixed = (scores.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2).reshape(x.shape)
        return x + self.out(mixed) * condition[:, None], None, bias


class Model(nn.Module):
    def __init__(self, dim: int, layers: int, heads: int):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.positions = nn.Parameter(torch.randn(LENGTH, dim))
        self.time = nn.Linear(3, dim)
        self.label = nn.Linear(2, dim)
        self.blocks = nn.ModuleList(
            [Block(dim, heads, makes_bias=layer == 0) for layer in range(layers)]
        )
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, tokens: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        x += self.positions
        condition = self.time(times)
        condition += self.label(labels)
        bias = None
        for block in self.blocks:
            outputs = block(x, bias, condition)
            x, bias = outputs[0], outputs[2]
        return self.head(x)


def build_model() -> nn.Module:
    return Model(dim=16, layers=5, heads=2)


def example_batch(microbatch_size: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    tokens = torch.randint(0, VOCABULARY, (microbatch_size, LENGTH + 1))
    times, labels = torch.randn(microbatch_size, 3), torch.randn(microbatch_size, 2)
    return (tokens[:, :-1].contiguous(), times, labels), tokens[:, 1:].contiguous()


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
