"""A mixture of eight experts that dispatches densely, two blocks of Mixtral's width."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "graph" / "zoo"))

import moe
from moe import loss_fn

__all__ = ["build_model", "example_batch", "loss_fn"]


def build_model():
    return moe.moe(moe.VOCABULARY, dim=4096, layers=2, heads=32, hidden=14336, experts=8, top_k=2)


def example_batch(microbatch_size):
    return moe.example_batch(microbatch_size, seq_len=2048)
