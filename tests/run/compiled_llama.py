"""A Llama with blocks of two kinds, and two of whose blocks torch draws no graph."""

import shallow_llama
import torch
from shallow_llama import example_batch, loss_fn
from torch import Tensor, nn

__all__ = ["build_model", "evaluate", "example_batch", "loss_fn"]


class Halved(nn.Module):
    """Has the tensors of another block, and computes otherwise."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.attention, self.feed_forward = block.attention, block.feed_forward
        self.attention_norm, self.ffn_norm = block.attention_norm, block.ffn_norm

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + 0.5 * self.attention(self.attention_norm(x), cos, sin)
        return x + 0.5 * self.feed_forward(self.ffn_norm(x))


def build_model() -> nn.Module:
    model = shallow_llama.build_model()
    model.layers = nn.ModuleList(
        Halved(block) if index % 2 else block for index, block in enumerate(model.layers)
    )
    return model


class Branching(nn.Module):
    """A block with other code for compilers, which no rule runs on parts of a sequence."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            x = x + x.cumsum(1) * 0.0
        return self.block(x, cos, sin)


def build_branching() -> nn.Module:
    model = build_model()
    model.layers = nn.ModuleList(Branching(block) for block in model.layers)
    return model


class Counting(nn.Module):
    """A block that scales by how often it ran."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        self.runs += 1.0
        return self.block(x * (1.0 + 1.0 / self.runs), cos, sin)


def build_counting() -> nn.Module:
    model = build_model()
    model.layers = nn.ModuleList(Counting(block) for block in model.layers)
    return model


def evaluate(model, step):
    return {"validation_loss": model.evaluate([example_batch(model.microbatch_size)])}
