"""A classifier with layers of uneven widths, as an nn.Sequential."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTHS = (64, 512, 256, 384, 128, 192, 64)
NUM_CLASSES = 10


def build_model() -> nn.Module:
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(WIDTHS):
        layers += [nn.Linear(width_in, width_out), nn.GELU()]
    layers.append(nn.Linear(WIDTHS[-1], NUM_CLASSES))
    return nn.Sequential(*layers)


def example_batch(microbatch_size: int) -> tuple[Tensor, Tensor]:
    """Random features and classes."""
    features = torch.randn(microbatch_size, WIDTHS[0])
    return features, torch.randint(0, NUM_CLASSES, (microbatch_size,))


def loss_fn(scores: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(scores, classes)
