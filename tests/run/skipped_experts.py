"""A mixture whose experts run only where they get rows, of few tokens: ranks use different ones."""

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, DIM, EXPERTS, BLOCKS = 64, 32, 8, 2


class Experts(nn.Module):
    """Sends each token to its best expert, and none to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
            for _ in range(EXPERTS)
        )
        with torch.no_grad():
            self.gate.bias[-1] = -1e6

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.gate(rows).softmax(-1).max(-1)
        out = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            mine = chosen == i
            if mine.any():
                out[mine] = weights[mine, None] * expert(rows[mine])
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.ffn = nn.LayerNorm(DIM), nn.Linear(DIM, DIM), Experts()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x))
        return x + self.ffn(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build_model() -> nn.Module:
    return Model()


def example_batch(microbatch_size: int, seq_len: int = 2) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (microbatch_size, seq_len + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())
