"""A model whose blocks are large beside their tokens."""

from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def model(vocab_size):
    """Source of a model file."""
    return f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
from llama import Llama, LlamaConfig, example_batch, loss_fn


def build_model():
    return Llama(
        LlamaConfig(
            dim=1024, n_layers=8, n_heads=16, n_kv_heads=4, ffn_dim=4096, vocab_size={vocab_size},
            max_seq_len=256,
        )
    )
"""
