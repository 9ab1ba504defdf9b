"""Llama-3-8B with its weights frozen, and trained adapters of rank 16 on all its layers."""

import sys
from pathlib import Path

from torch import nn

sys.path.append(str(Path(__file__).parents[2] / "examples"))
sys.path.append(str(Path(__file__).parents[1] / "graph" / "zoo"))
from llama import example_batch, llama_8b, loss_fn
from lora import adapt

__all__ = ["build_model", "example_batch", "loss_fn"]

LAYERS = ("wq", "wk", "wv", "wo", "w1", "w2", "w3")


def build_model() -> nn.Module:
    return adapt(llama_8b(), LAYERS, rank=16, scale=2.0)
