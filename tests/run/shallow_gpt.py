"""The GPT of the examples with four blocks, where eight would only take longer."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from gpt import GPT, GPTConfig, example_batch, loss_fn

__all__ = ["build_model", "example_batch", "loss_fn"]


def build_model():
    return GPT(GPTConfig(n_layer=4))
