"""Small models whose steps show what the host takes, whatever the tensors.

``build`` and ``loss_fn`` are what a user's model file would have: the script's own runtime trains
them here as it trains any model.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

WIDTH = 16
CLASSES = 2048


class Block(nn.Module):
    """A transformer block, which may have more element-wise ops than usual."""

    def __init__(self, width: int = WIDTH, heads: int = 2, more_ops: int = 0) -> None:
        super().__init__()
        self.heads, self.more_ops = heads, more_ops
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Run it on (batch, sequence, width)."""
        batch, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).split(width, dim=2)
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in parts
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        ahead = F.gelu(self.wide(self.norm_2(x)))
        for _ in range(self.more_ops):  # with as many views beside them as ops of models have
            ahead = F.gelu(ahead.transpose(1, 2)).transpose(1, 2)
        narrow: Tensor = self.narrow(ahead)
        return x + narrow


def transformer(
    num_blocks: int, width: int = WIDTH, heads: int = 2, more_ops: int = 0
) -> nn.Sequential:
    """Some blocks in a row."""
    return nn.Sequential(*(Block(width, heads, more_ops) for _ in range(num_blocks)))


class TokenModel(nn.Module):
    """Blocks between a table and a head, whose logits are larger than what blocks compute."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(CLASSES, width), nn.Linear(width, CLASSES)
        self.blocks = nn.Sequential(*(Block(width, heads=8) for _ in range(blocks)))

    def forward(self, tokens: Tensor) -> Tensor:
        """Run it on (batch, sequence), to the loss of the tokens themselves."""
        logits = self.head(self.blocks(self.table(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Scaled(nn.Module):
    """One product with each of some parameters, which makes few ops for many tensors."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(tensors))

    def forward(self, x: Tensor) -> Tensor:
        """Scale by all of them at once."""
        return x * torch.stack(tuple(self.scales)).sum(0)


def scaled(num_blocks: int, tensors: int) -> nn.Sequential:
    """Blocks with so many parameters each."""
    return nn.Sequential(*(Scaled(tensors) for _ in range(num_blocks)))


def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
    """Some loss."""
    return F.mse_loss(output, targets)
