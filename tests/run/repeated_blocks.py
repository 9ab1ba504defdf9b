"""Three blocks, each at two places of their list: its parameters have two names each."""

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, LENGTH, VOCABULARY = 32, 4, 16, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        size, length, width = x.shape
        y = self.norm(x)
        heads = (
            m(y).view(size, length, HEADS, -1).transpose(1, 2) for m in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(size, length, width))
        return x + self.down(functional.gelu(self.up(self.after(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        blocks = [Block() for _ in range(3)]
        self.layers = nn.ModuleList([*blocks, *blocks])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build_model() -> nn.Module:
    return Model()


def example_batch(microbatch_size: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (microbatch_size, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(scores: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
