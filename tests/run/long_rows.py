"""A few blocks of linear layers on long sequences: their rows take most of the memory."""

import torch
from torch import nn
from torch.nn import functional

TOKENS, FEATURES, WIDTH, CLASSES = 8192, 16, 512, 10


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(x)))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean(1)


def build_model():
    return Blocks()


def example_batch(microbatch_size):
    samples = torch.randn(microbatch_size, TOKENS, FEATURES)
    return samples, torch.randint(0, CLASSES, (microbatch_size,))


def loss_fn(output, targets):
    return functional.cross_entropy(output, targets)
