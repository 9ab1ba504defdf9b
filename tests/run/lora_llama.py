"""The small Llama of four blocks with its weights frozen, and trained adapters on all layers."""

import sys
from pathlib import Path

from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "graph" / "zoo"))
from lora import adapt
from shallow_llama import build_model as build_llama
from shallow_llama import example_batch, loss_fn

__all__ = ["build_model", "example_batch", "loss_fn"]

LAYERS = ("wq", "wk", "wv", "wo", "w1", "w2", "w3")


def build_model() -> nn.Module:
    model = adapt(build_llama(), LAYERS, rank=4, scale=2.0)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b.weight"):
            nn.init.normal_(parameter, std=0.02)  # so that the first step sees all gradients
    return model
