"""Residual blocks no two of which are as wide inside: ``BLOCKS`` of them."""

import os

import torch
from torch import Tensor, nn
from torch.nn import functional

BLOCKS = int(os.environ.get("BLOCKS", "150"))
WIDTH, TOKENS, FEATURES, CLASSES = 1024, 512, 64, 10


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, WIDTH)
        widths = (2048 + 16 * (index * 7919 % 1000) for index in range(BLOCKS))
        self.blocks = nn.ModuleList(Block(hidden) for hidden in widths)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean(1)


def build_model() -> nn.Module:
    return Blocks()


def example_batch(microbatch_size: int) -> tuple[Tensor, Tensor]:
    samples = torch.randn(microbatch_size, TOKENS, FEATURES)
    return samples, torch.randint(0, CLASSES, (microbatch_size,))


def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output, targets)
