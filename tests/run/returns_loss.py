"""The shape of nanoGPT: forward takes targets and returns (logits, loss), the loss views them."""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from gpt import GPT, GPTConfig


class NanoGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        whole = GPT(GPTConfig(n_layer=4))
        self.transformer, self.lm_head = whole.transformer, whole.lm_head

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        positions = torch.arange(idx.shape[1], device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(positions)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        flat = logits.view(-1, logits.size(-1))
        return logits, functional.cross_entropy(flat, targets.view(-1), ignore_index=-1)


def build_model() -> nn.Module:
    return NanoGPT()


def example_batch(microbatch_size: int, seq_len: int = 16) -> tuple[tuple[Tensor, Tensor], None]:
    tokens = torch.randint(0, 100, (microbatch_size, seq_len + 1))
    return (tokens[:, :-1], tokens[:, 1:]), None
