"""Modules in blocks that code outside of the blocks calls, too: at the start, and at the end."""

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, LENGTH, KINDS, VOCABULARY = 32, 16, 8, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.kind = nn.LayerNorm(WIDTH), nn.Embedding(KINDS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        scaled = self.norm(x) * (1 + self.kind(kinds)[:, None])
        return x + self.down(functional.gelu(self.up(scaled)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(7))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, kinds: Tensor) -> Tensor:
        x = self.blocks[-1].norm(self.embed(tokens))
        for block in self.blocks:
            x = block(x, kinds)
        return self.head(x * (1 + self.blocks[0].kind(kinds)[:, None]))


def build_model() -> nn.Module:
    return Model()


def example_batch(microbatch_size: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    tokens = torch.randint(VOCABULARY, (microbatch_size, LENGTH + 1))
    kinds = torch.randint(KINDS, (microbatch_size,))
    return (tokens[:, :-1], kinds), tokens[:, 1:]


def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())
