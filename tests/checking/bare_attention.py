"""Layers without a forward of their own: each of their modules is a block, attention as well."""

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, CLASSES, TOKENS, LAYERS = 128, 64, 32, 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [
                    *(nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 4, batch_first=True)),
                    *(nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)),
                ]
            )
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for norm, attention, up, down in self.layers:
            y = norm(x)
            x = x + attention(y, y, value=y, need_weights=False)[0]
            gate, wide = up(x).chunk(2, -1)
            x = x + down(gate * functional.silu(wide))
        return self.head(x)


def build_model() -> nn.Module:
    return Model()


def example_batch(microbatch_size: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(CLASSES, (microbatch_size, TOKENS))
    return tokens, tokens


def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())
