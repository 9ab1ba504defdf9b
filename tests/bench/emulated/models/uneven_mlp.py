"""A classifier whose layers differ in width up to eight times."""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

WIDTHS = (256, 1024, 512, 768, 128, 640, 256)
SAMPLES = 64
"""Rows of features in one sample."""


class Rows(nn.Module):
    """Scores of the rows of each sample."""

    def __init__(self):
        super().__init__()
        layers = [
            part
            for pair in pairwise(WIDTHS)
            for part in (nn.Linear(*pair), nn.GELU(), nn.LayerNorm(pair[1]))
        ]
        self.layers = nn.Sequential(*layers)
        self.scores = nn.Linear(WIDTHS[-1], 10)

    def forward(self, x):
        return self.scores(self.layers(x))


def build_model():
    return Rows()


def example_batch(microbatch_size):
    features = torch.randn(microbatch_size, SAMPLES, WIDTHS[0])
    return features, torch.randint(0, 10, (microbatch_size, SAMPLES))


def loss_fn(scores, classes):
    return F.cross_entropy(scores.flatten(0, 1), classes.flatten())
