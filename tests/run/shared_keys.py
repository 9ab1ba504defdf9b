"""Layers that use the keys of an earlier one; gradients of theirs and of a weight come turned."""

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, LENGTH, VOCABULARY = 32, 4, 16, 64


class Layer(nn.Module):
    def __init__(self, *, has_keys: bool) -> None:
        super().__init__()
        self.norm, self.query, self.out = (
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        )  # fmt: skip
        self.keys = nn.Linear(WIDTH, 2 * WIDTH) if has_keys else None
        self.parts = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        y = self.norm(x)
        keys = self.keys(y).mT if self.keys is not None else keys
        q, k, v = (
            each.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for each in (self.query(y), *keys.mT.chunk(2, -1))
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + torch.einsum("btd,edf->btef", x, self.parts).relu().sum(2), keys


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(has_keys=i < 3) for i in range(6))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x, keys = self.embed(tokens), None
        for layer in self.layers:
            x, keys = layer(x, keys)
        return self.head(x)


def build_model() -> nn.Module:
    return Model()


def example_batch(microbatch_size: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (microbatch_size, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())
