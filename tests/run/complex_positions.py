"""A small decoder whose rotary positions are complex numbers in a buffer."""

import torch
from torch import Tensor, nn
from torch.nn import functional

DIM, HEADS, VOCABULARY, LONGEST = 64, 4, 256, 64


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Turn pairs of features of (samples, tokens, heads, features)."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).to(turns.real.dtype))
    return torch.view_as_real(pairs * turns[: x.shape[1], None]).flatten(-2).type_as(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.wq, self.wk = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.wv, self.wo = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = (each(h).unflatten(-1, (HEADS, -1)) for each in (self.wq, self.wk, self.wv))
        q, k = rotated(q, turns), rotated(k, turns)
        heads = (each.transpose(1, 2) for each in (q, k, v))
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.wo(attended.transpose(1, 2).flatten(-2))
        return x + self.down(functional.silu(self.up(self.ffn_norm(x))))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)
        rates = 100.0 ** -torch.linspace(0, 1, DIM // HEADS // 2)
        angles = torch.outer(torch.arange(LONGEST).float(), rates)
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.turns)
        return self.head(self.norm(x))


def build_model() -> nn.Module:
    return Decoder()


def example_batch(samples: int, seq_len: int = 32) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (samples, seq_len + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
