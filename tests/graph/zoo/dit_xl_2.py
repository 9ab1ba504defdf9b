"""DiT-XL/2 on latents of 32 x 32."""

from dit import dit_xl_2, latent_batch, loss_fn
from torch import Tensor

__all__ = ["build_model", "example_batch", "loss_fn"]

build_model = dit_xl_2


def example_batch(microbatch_size: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    return latent_batch(microbatch_size, 32)
