"""Two blocks of a few kernels each, and one whose code torch.compile does not trace."""

import torch
from torch import Tensor, nn

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, features: Tensor) -> Tensor:
        return features + torch.nn.functional.gelu(self.linear(self.norm(features)))


class Printing(Block):
    def forward(self, features: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(features)


class Model(nn.Module):
    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, features: Tensor) -> Tensor:
        for block in self.blocks:
            features = block(features)
        return self.head(features)


def build_model() -> nn.Module:
    return Model(Block)


def build_broken() -> nn.Module:
    return Model(Printing)


def example_batch(microbatch_size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(microbatch_size, WIDTH), torch.randint(0, 4, (microbatch_size,))


def loss_fn(scores: Tensor, classes: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores, classes)


def evaluate(model, step):
    return {"validation_loss": model.evaluate([example_batch(model.microbatch_size)])}
