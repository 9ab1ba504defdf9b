"""A diffusion transformer (arXiv 2212.09748): adaptive layer norms driven by time and class."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CHANNELS = 4
NUM_CLASSES = 1000
FREQUENCIES = 128


class DiTBlock(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False)
        self.fc1 = nn.Linear(dim, 4 * dim)
        self.fc2 = nn.Linear(4 * dim, dim)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def attention(self, x: Tensor) -> Tensor:
        size, length, dim = x.shape
        q, k, v = self.qkv(x).view(size, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).reshape(size, length, dim))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = (
            self.modulation(condition).unsqueeze(1).chunk(6, dim=-1)
        )
        x = x + gate1 * self.attention(self.norm1(x) * (1 + scale1) + shift1)
        h = self.norm2(x) * (1 + scale2) + shift2
        return x + gate2 * self.fc2(F.gelu(self.fc1(h), approximate="tanh"))


class DiT(nn.Module):
    """Predicts noise and its variance for latents (batch, channels, side, side)."""

    def __init__(self, side: int, patch: int, dim: int, layers: int, heads: int):
        super().__init__()
        self.side, self.patch = side, patch
        self.patches = nn.Conv2d(CHANNELS, dim, patch, patch)
        self.positions = nn.Parameter(torch.zeros(1, (side // patch) ** 2, dim))
        self.time = nn.Sequential(nn.Linear(2 * FREQUENCIES, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.classes = nn.Embedding(NUM_CLASSES + 1, dim)
        self.blocks = nn.ModuleList([DiTBlock(dim, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))
        self.head = nn.Linear(dim, patch * patch * 2 * CHANNELS)

    def condition(self, times: Tensor, classes: Tensor) -> Tensor:
        steps = torch.arange(FREQUENCIES, device=times.device)
        angles = times[:, None] * torch.exp(-math.log(10000) * steps / FREQUENCIES)
        waves = torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)
        return self.time(waves.to(self.positions.dtype)) + self.classes(classes)

    def forward(self, latents: Tensor, times: Tensor, classes: Tensor) -> Tensor:
        x = self.patches(latents).flatten(2).transpose(1, 2) + self.positions
        condition = self.condition(times, classes)
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(condition).unsqueeze(1).chunk(2, dim=-1)
        x = self.head(self.norm(x) * (1 + scale) + shift)
        count = self.side // self.patch
        x = x.view(-1, count, count, self.patch, self.patch, 2 * CHANNELS)
        return x.permute(0, 5, 1, 3, 2, 4).reshape(-1, 2 * CHANNELS, self.side, self.side)


def build_model() -> nn.Module:
    """A small model that trains in seconds on a CPU."""
    return DiT(side=16, patch=2, dim=64, layers=4, heads=4)


def dit_xl_2() -> nn.Module:
    """DiT-XL/2: 675M parameters, on latents of 32 x 32 (images of 256 x 256)."""
    return DiT(side=32, patch=2, dim=1152, layers=28, heads=16)


def latent_batch(size: int, side: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    latents = torch.randn(size, CHANNELS, side, side)
    times = torch.rand(size)
    classes = torch.randint(0, NUM_CLASSES, (size,))
    return (latents, times, classes), torch.randn(size, CHANNELS, side, side)


def example_batch(microbatch_size: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    return latent_batch(microbatch_size, 16)


def loss_fn(prediction: Tensor, noise: Tensor) -> Tensor:
    return F.mse_loss(prediction[:, :CHANNELS], noise)
