"""A vision transformer with parallel blocks and normalised queries and keys, as ViT-22B."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NUM_CLASSES = 10


class ParallelBlock(nn.Module):
    """Attention and feed-forward layer read the same norm; their sum is added to the stream."""

    def __init__(self, dim: int, heads: int, hidden: int):
        super().__init__()
        self.dim, self.heads = dim, heads
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.q_norm = nn.LayerNorm(dim // heads)
        self.k_norm = nn.LayerNorm(dim // heads)
        self.proj = nn.Linear(dim, dim)
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        size, length, _ = x.shape
        h = self.norm(x)
        q, k, v = self.qkv(h).view(size, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        attended = self.proj(out.transpose(1, 2).reshape(size, length, self.dim))
        return x + attended + self.fc2(F.gelu(self.fc1(h)))


class ViT(nn.Module):
    def __init__(
        self, image: int, patch: int, dim: int, layers: int, heads: int, hidden: int, classes: int
    ):
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(torch.zeros(1, (image // patch) ** 2 + 1, dim))
        self.blocks = nn.Sequential(*[ParallelBlock(dim, heads, hidden) for _ in range(layers)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


def build_model() -> nn.Module:
    """A small model that trains in seconds on a CPU."""
    return ViT(image=32, patch=4, dim=64, layers=4, heads=4, hidden=256, classes=NUM_CLASSES)


def vit_22b() -> nn.Module:
    """The shape of ViT-22B (arXiv 2302.05442): 21.7 billion parameters, patches of 14."""
    return ViT(image=224, patch=14, dim=6144, layers=48, heads=48, hidden=24576, classes=1000)


def example_batch(microbatch_size: int) -> tuple[Tensor, Tensor]:
    images = torch.randn(microbatch_size, 3, 32, 32)
    return images, torch.randint(0, NUM_CLASSES, (microbatch_size,))


def loss_fn(scores: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(scores, classes)
