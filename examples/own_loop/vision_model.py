"""A small vision transformer of torch's own layers."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IMAGE_SIZE, PATCH_SIZE, NUM_CLASSES, WIDTH = 16, 4, 10, 64


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH_SIZE, PATCH_SIZE)
        self.positions = nn.Parameter(0.02 * torch.randn((IMAGE_SIZE // PATCH_SIZE) ** 2, WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(4)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def build_model() -> nn.Module:
    return ViT()


def example_batch(microbatch_size: int) -> tuple[Tensor, Tensor]:
    images = torch.randn(microbatch_size, 3, IMAGE_SIZE, IMAGE_SIZE)
    return images, torch.randint(0, NUM_CLASSES, (microbatch_size,))


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, label_smoothing=0.1)
