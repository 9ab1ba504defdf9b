"""A vision transformer with parallel blocks."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "graph" / "zoo"))

import vit
from vit import example_batch, loss_fn

__all__ = ["build_model", "example_batch", "loss_fn"]


def build_model():
    return vit.ViT(image=32, patch=4, dim=192, layers=4, heads=4, hidden=768, classes=10)
