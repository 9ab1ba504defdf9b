"""Frames that a draw masks, of which the loss is; blocks scale by a draw of their own."""

import random

import numpy as np
import torch
from torch import Tensor, nn

FRAMES, DIM, BLOCKS = 16, 32, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(DIM),
            nn.Linear(DIM, 4 * DIM),
            nn.Linear(4 * DIM, DIM),
        )

    def forward(self, x: Tensor) -> Tensor:
        scale = 0.5 + random.random() + float(np.random.rand())
        return x + self.down(nn.functional.gelu(scale * self.up(self.norm(x))))


class Plain(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        self.enter = nn.Linear(DIM, DIM)
        self.mask = nn.Parameter(torch.zeros(DIM))
        self.blocks = nn.ModuleList(block() for _ in range(BLOCKS))
        self.leave = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        spans = torch.as_tensor(np.random.rand(x.shape[0], FRAMES) < 0.4, device=x.device)
        masked = spans.unsqueeze(-1).to(x.dtype)
        h = self.enter(x) * (1 - masked) + self.mask * masked
        for block in self.blocks:
            h = block(h)
        return self.leave(h), masked


def build_model() -> nn.Module:
    return Model(Plain)


def example_batch(microbatch_size: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(microbatch_size, FRAMES, DIM)
    return x, x.clone()


def loss_fn(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    frames, masked = output
    return ((frames - targets).square() * masked).sum() / masked.sum().clamp(min=1)
