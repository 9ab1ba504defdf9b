"""A model whose blocks need whole rows of their hidden features, all but the last."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HIDDEN = 32, 64
LENGTH = HIDDEN
"""A quarter turn of (tokens, features) keeps the shape."""

BETWEEN = {
    "cummax": lambda h: h.cummax(-1).values,
    "cumprod": lambda h: h.tanh().cumprod(-1),
    "logcumsumexp": lambda h: h.logcumsumexp(-1),
    "tril": torch.tril,
    "rot90": partial(torch.rot90, k=1, dims=(1, 2)),
    "gelu": functional.gelu,
}


class Block(nn.Module):
    def __init__(self, between: str):
        super().__init__()
        self.between = between
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(BETWEEN[self.between](self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(name) for name in BETWEEN)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def build_model() -> nn.Module:
    return Model()


def example_batch(microbatch_size: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(microbatch_size, LENGTH, WIDTH)
    return x, torch.randn(microbatch_size, LENGTH, WIDTH)


def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(output, targets)
