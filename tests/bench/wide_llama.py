"""A Llama whose kernels take longer than their launch, so that a script's own work is seen."""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from llama import Llama, LlamaConfig, loss_fn

__all__ = ["build_model", "example_batch", "loss_fn"]

VOCABULARY, SEQUENCE = 2048, 256


def build_model() -> nn.Module:
    return Llama(
        LlamaConfig(
            dim=384, n_layers=6, n_heads=6, n_kv_heads=6, ffn_dim=1024, vocab_size=VOCABULARY,
            max_seq_len=SEQUENCE,
        )
    )  # fmt: skip


def example_batch(microbatch_size: int, seq_len: int = SEQUENCE) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (microbatch_size, seq_len + 1))
    return tokens[:, :-1], tokens[:, 1:]
