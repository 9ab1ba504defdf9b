"""A mixture of four experts in each of four blocks."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "graph" / "zoo"))

import moe
from moe import loss_fn

__all__ = ["build_model", "example_batch", "loss_fn"]


def build_model():
    return moe.moe(moe.VOCABULARY, dim=128, layers=4, heads=4, hidden=384, experts=4, top_k=2)


def example_batch(microbatch_size):
    return moe.example_batch(microbatch_size, seq_len=32)
