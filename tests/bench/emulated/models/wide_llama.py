"""The Llama of the examples, wide enough that products of matrices are most of a step."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[4] / "examples"))

import llama
from llama import loss_fn

__all__ = ["build_model", "example_batch", "loss_fn"]


def build_model():
    return llama.Llama(
        llama.LlamaConfig(
            dim=160,
            n_layers=6,
            n_heads=8,
            n_kv_heads=4,
            ffn_dim=448,
            vocab_size=512,
            max_seq_len=64,
        )
    )


def example_batch(microbatch_size):
    return llama.example_batch(microbatch_size, seq_len=64)
