"""Two streams with joint attention, as in SD3; parameters that are scalars, or empty.

Nothing reads what the last block makes of the text.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

DIM, HEADS = 32, 4
IMAGE, TEXT = 12, 6


class Stream(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.gate = nn.Parameter(torch.tensor(0.5))

    def heads(self, x: Tensor) -> list[Tensor]:
        made = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        return [each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in made]

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + self.gate * self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = Stream(), Stream()
        self.temperature = nn.Parameter(torch.tensor(0.25))
        self.registers = nn.Parameter(torch.empty(0, DIM))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        text = torch.cat([text, self.registers.expand(text.shape[0], -1, -1)], 1)
        pairs = zip(self.text.heads(text), self.image.heads(image), strict=True)
        q, k, v = (torch.cat(pair, dim=2) for pair in pairs)
        mixed = functional.scaled_dot_product_attention(q, k, v) * self.temperature.exp()
        of_text, of_image = mixed.split([TEXT, IMAGE], dim=2)
        return self.image.after(image, of_image), self.text.after(text, of_text)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(8, DIM), nn.Linear(5, DIM)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(DIM, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.more = nn.Parameter(torch.empty(DIM, 0))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        image, text = self.image(image), self.text(text)
        for block in self.blocks:
            image, text = block(image, text)
        return self.head(torch.cat([image, image @ self.more], -1)) * self.scale


def build_model() -> nn.Module:
    return Model()


def example_batch(microbatch_size: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    image = torch.randn(microbatch_size, IMAGE, 8)
    return (image, torch.randn(microbatch_size, TEXT, 5)), torch.randn_like(image)


def loss_fn(prediction: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(prediction, target)
