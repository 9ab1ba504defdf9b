"""A U-Net with skip connections over all of its cuts."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "graph" / "zoo"))

import unet
from unet import loss_fn

__all__ = ["build_model", "example_batch", "loss_fn"]

CONFIG = unet.UNetConfig(base=48, multipliers=(1, 2), depths=(0, 1), groups=8)


def build_model():
    return unet.UNet(CONFIG)


def example_batch(microbatch_size):
    return unet.latent_batch(microbatch_size, 16, 7, CONFIG)
