"""The GPT of the examples, wide enough that products of matrices are most of a step."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[4] / "examples"))

import gpt
from gpt import loss_fn

__all__ = ["build_model", "example_batch", "loss_fn"]


def build_model():
    return gpt.GPT(gpt.GPTConfig(vocab_size=512, block_size=128, n_layer=4, n_head=8, n_embd=192))


def example_batch(microbatch_size):
    return gpt.example_batch(microbatch_size, seq_len=128)
