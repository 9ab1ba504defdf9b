"""ResNet-50 on images of ImageNet's size."""

import torch
from resnet import loss_fn, resnet_50
from torch import Tensor

__all__ = ["build_model", "example_batch", "loss_fn"]

build_model = resnet_50


def example_batch(microbatch_size: int) -> tuple[Tensor, Tensor]:
    images = torch.randn(microbatch_size, 3, 224, 224)
    return images, torch.randint(0, 1000, (microbatch_size,))
