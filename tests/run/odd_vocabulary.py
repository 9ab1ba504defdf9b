"""The GPT of the examples with a vocabulary that two ranks cannot share evenly."""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from gpt import GPT, GPTConfig, loss_fn

__all__ = ["build_model", "example_batch", "loss_fn"]

VOCABULARY = 131


def build_model() -> nn.Module:
    return GPT(GPTConfig(vocab_size=VOCABULARY, n_layer=4))


def example_batch(microbatch_size: int, seq_len: int = 16) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (microbatch_size, seq_len + 1))
    return tokens[:, :-1], tokens[:, 1:]
