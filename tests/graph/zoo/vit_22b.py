"""ViT-22B on images of 224 x 224."""

import torch
from torch import Tensor
from vit import loss_fn, vit_22b

__all__ = ["build_model", "example_batch", "loss_fn"]

build_model = vit_22b


def example_batch(microbatch_size: int) -> tuple[Tensor, Tensor]:
    images = torch.randn(microbatch_size, 3, 224, 224)
    return images, torch.randint(0, 1000, (microbatch_size,))
