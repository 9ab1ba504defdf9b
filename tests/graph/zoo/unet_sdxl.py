"""The U-Net of SDXL on latents of 128 x 128 (images of 1024 x 1024) with 77 words."""

from torch import Tensor
from unet import UNetConfig, latent_batch, loss_fn, sdxl

__all__ = ["build_model", "example_batch", "loss_fn"]

build_model = sdxl


def example_batch(
    microbatch_size: int,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
    return latent_batch(microbatch_size, 128, 77, UNetConfig(context_dim=2048, pooled_dim=2816))
