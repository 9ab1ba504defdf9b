"""A decoder whose activation is an autograd function of its own.

It keeps the two inputs of a gated activation and makes the rest again in backward.
"""

import torch
from decoder import Attention, Block, Decoder, token_batch, token_loss
from torch import Tensor, nn

VOCABULARY = 128


class GatedSilu(torch.autograd.Function):
    """silu(gate) * up."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return gate * torch.sigmoid(gate) * up

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        slope = sigmoid + silu * (1 - sigmoid)
        return grad * up * slope, grad * silu


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(GatedSilu.apply(gate, up))


def build_model() -> nn.Module:
    """A small model that trains in seconds on a CPU."""

    def block(_: int) -> Block:
        return Block(64, Attention(64, heads=4, kv_heads=2), FeedForward(64, 128))

    return Decoder(VOCABULARY, 64, layers=4, rotary_dim=16, make_block=block)


def example_batch(microbatch_size: int, seq_len: int = 32) -> tuple[Tensor, Tensor]:
    return token_batch(microbatch_size, seq_len, VOCABULARY)


loss_fn = token_loss
