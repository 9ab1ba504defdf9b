"""A U-Net with skip connections and cross-attention, as in SDXL (arXiv 2307.01952).

Latents go down and up through levels of residual blocks and transformers; what each step of the
way down makes is concatenated to the input of a step of the way up.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CHANNELS = 4


@dataclass
class UNetConfig:
    base: int = 32
    multipliers: tuple[int, ...] = (1, 2)
    depths: tuple[int, ...] = (0, 1)
    """Transformer blocks after each residual block, by level."""
    context_dim: int = 48
    pooled_dim: int = 24
    head_dim: int = 16
    groups: int = 8
    blocks_per_level: int = 2


class ResBlock(nn.Module):
    """Two convolutions; the embedding of time is added in between."""

    def __init__(self, channels_in: int, channels: int, time_dim: int, groups: int):
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels, 3, padding=1)
        self.time = nn.Linear(time_dim, channels)
        self.norm2 = nn.GroupNorm(groups, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.shortcut = nn.Identity()
        if channels_in != channels:
            self.shortcut = nn.Conv2d(channels_in, channels, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(h)))


class CrossAttention(nn.Module):
    def __init__(self, dim: int, context_dim: int, head_dim: int):
        super().__init__()
        self.head_dim = head_dim
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(context_dim, dim, bias=False)
        self.v = nn.Linear(context_dim, dim, bias=False)
        self.o = nn.Linear(dim, dim)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (
            made.view(*made.shape[:2], -1, self.head_dim).transpose(1, 2)
            for made in (self.q(x), self.k(context), self.v(context))
        )
        out = F.scaled_dot_product_attention(q, k, v)
        return self.o(out.transpose(1, 2).reshape(x.shape))


class TransformerBlock(nn.Module):
    """Self-attention, attention to the text, and a gated feed-forward layer."""

    def __init__(self, dim: int, context_dim: int, head_dim: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn1 = CrossAttention(dim, dim, head_dim)
        self.norm2 = nn.LayerNorm(dim)
        self.attn2 = CrossAttention(dim, context_dim, head_dim)
        self.norm3 = nn.LayerNorm(dim)
        self.ff_in = nn.Linear(dim, 8 * dim)
        self.ff_out = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attn1(h, h)
        x = x + self.attn2(self.norm2(x), context)
        value, gate = self.ff_in(self.norm3(x)).chunk(2, dim=-1)
        return x + self.ff_out(value * F.gelu(gate))


class SpatialTransformer(nn.Module):
    """Transformer blocks over the pixels."""

    def __init__(self, channels: int, depth: int, config: UNetConfig):
        super().__init__()
        self.norm = nn.GroupNorm(config.groups, channels)
        self.proj_in = nn.Linear(channels, channels)
        self.blocks = nn.ModuleList(
            [TransformerBlock(channels, config.context_dim, config.head_dim) for _ in range(depth)]
        )
        self.proj_out = nn.Linear(channels, channels)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        size, channels, height, width = x.shape
        h = self.proj_in(self.norm(x).flatten(2).transpose(1, 2))
        for block in self.blocks:
            h = block(h, context)
        h = self.proj_out(h).transpose(1, 2).reshape(size, channels, height, width)
        return x + h


class Step(nn.Module):
    """A residual block and the transformer behind it, where the level has one."""

    def __init__(self, channels_in: int, channels: int, depth: int, config: UNetConfig):
        super().__init__()
        self.res = ResBlock(channels_in, channels, 4 * config.base, config.groups)
        self.attention = SpatialTransformer(channels, depth, config) if depth else None

    def forward(self, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
        x = self.res(x, time)
        return x if self.attention is None else self.attention(x, context)


class Downsample(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, 2, 1)

    def forward(self, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
        return self.conv(x)


class UpStep(nn.Module):
    """A step on the concatenation with a skip, then upsampling where a level ends."""

    def __init__(
        self, channels_in: int, channels: int, depth: int, config: UNetConfig, *, upsample: bool
    ):
        super().__init__()
        self.step = Step(channels_in, channels, depth, config)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1) if upsample else None

    def forward(self, x: Tensor, skip: Tensor, time: Tensor, context: Tensor) -> Tensor:
        x = self.step(torch.cat([x, skip], dim=1), time, context)
        return x if self.conv is None else self.conv(F.interpolate(x, scale_factor=2.0))


class UNet(nn.Module):
    """Predicts the noise in latents (batch, 4, side, side)."""

    def __init__(self, config: UNetConfig):
        super().__init__()
        self.base = config.base
        time_dim = 4 * config.base
        self.time = nn.Sequential(
            nn.Linear(config.base, time_dim), nn.SiLU(), nn.Linear(time_dim, time_dim)
        )
        self.pooled = nn.Sequential(
            nn.Linear(config.pooled_dim, time_dim), nn.SiLU(), nn.Linear(time_dim, time_dim)
        )
        self.conv_in = nn.Conv2d(CHANNELS, config.base, 3, padding=1)
        widths = [config.base * each for each in config.multipliers]
        self.down, skips = self.make_down(widths, config)
        self.middle = nn.ModuleList(
            [
                Step(widths[-1], widths[-1], config.depths[-1], config),
                Step(widths[-1], widths[-1], 0, config),
            ]
        )
        self.up = self.make_up(widths, skips, config)
        self.norm_out = nn.GroupNorm(config.groups, config.base)
        self.conv_out = nn.Conv2d(config.base, CHANNELS, 3, padding=1)

    def make_down(self, widths: list[int], config: UNetConfig) -> tuple[nn.ModuleList, list[int]]:
        steps: list[nn.Module] = []
        skips = [config.base]
        width_in = config.base
        for level, width in enumerate(widths):
            for _ in range(config.blocks_per_level):
                steps.append(Step(width_in, width, config.depths[level], config))
                skips.append(width)
                width_in = width
            if level < len(widths) - 1:
                steps.append(Downsample(width))
                skips.append(width)
        return nn.ModuleList(steps), skips

    def make_up(self, widths: list[int], skips: list[int], config: UNetConfig) -> nn.ModuleList:
        steps: list[nn.Module] = []
        width_in = widths[-1]
        for level in reversed(range(len(widths))):
            for position in range(config.blocks_per_level + 1):
                upsample = level > 0 and position == config.blocks_per_level
                steps.append(
                    UpStep(
                        width_in + skips.pop(),
                        widths[level],
                        config.depths[level],
                        config,
                        upsample=upsample,
                    )
                )
                width_in = widths[level]
        return nn.ModuleList(steps)

    def embed(self, times: Tensor, pooled: Tensor) -> Tensor:
        half = self.base // 2
        steps = torch.arange(half, device=times.device)
        angles = times[:, None] * torch.exp(-math.log(10000) * steps / half)
        waves = torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)
        return self.time(waves.to(pooled.dtype)) + self.pooled(pooled)

    def forward(self, latents: Tensor, times: Tensor, context: Tensor, pooled: Tensor) -> Tensor:
        time = self.embed(times, pooled)
        x = self.conv_in(latents)
        skips = [x]
        for step in self.down:
            x = step(x, time, context)
            skips.append(x)
        for step in self.middle:
            x = step(x, time, context)
        for step in self.up:
            x = step(x, skips.pop(), time, context)
        return self.conv_out(F.silu(self.norm_out(x)))


def build_model() -> nn.Module:
    """A small model that trains in seconds on a CPU."""
    return UNet(UNetConfig())


def sdxl() -> nn.Module:
    """The shape of SDXL: 2.6 billion parameters."""
    return UNet(
        UNetConfig(
            base=320,
            multipliers=(1, 2, 4),
            depths=(0, 2, 10),
            context_dim=2048,
            pooled_dim=2816,
            head_dim=64,
            groups=32,
        )
    )


def latent_batch(
    size: int, side: int, words: int, config: UNetConfig
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Noisy latents, times, text and pooled text, and the noise to predict."""
    latents = torch.randn(size, CHANNELS, side, side)
    context = torch.randn(size, words, config.context_dim)
    pooled = torch.randn(size, config.pooled_dim)
    return (latents, torch.rand(size), context, pooled), torch.randn_like(latents)


def example_batch(
    microbatch_size: int,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
    return latent_batch(microbatch_size, 16, 7, UNetConfig())


def loss_fn(prediction: Tensor, noise: Tensor) -> Tensor:
    return F.mse_loss(prediction, noise)
