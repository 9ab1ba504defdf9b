"""A mixture of experts with attention: tp splits heads, and its ranks are among those of ep."""

from routed_experts import DIM, EXPERTS, VOCABULARY, Mixture, example_batch, loss_fn
from torch import Tensor, nn
from torch.nn import functional

HEADS, BLOCKS = 4, 4

__all__ = ["build_model", "example_batch", "loss_fn"]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (
            each(x).view(batch, tokens, HEADS, -1).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1))


class Block(nn.Module):
    def __init__(self, favoured: int, top: int) -> None:
        super().__init__()
        self.first_norm, self.attention = nn.LayerNorm(DIM), Attention()
        self.second_norm, self.ffn = nn.LayerNorm(DIM), Mixture(favoured, top)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first_norm(x))
        return x + self.ffn(self.second_norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(
            Block(EXPERTS if i % 2 else EXPERTS // 2, top=2 - i // 2) for i in range(BLOCKS)
        )
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build_model() -> nn.Module:
    return Model()
