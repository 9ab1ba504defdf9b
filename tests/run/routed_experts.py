"""Mixtures of experts whose weights lie side by side, with biases, two or one of them for a token.

Some experts get none.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, DIM, EXPERTS, BLOCKS = 128, 32, 8, 4


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Parameter(torch.randn(EXPERTS, DIM, 2 * DIM) * DIM**-0.5)
        self.out_of = nn.Parameter(torch.randn(EXPERTS, 2 * DIM, DIM) * (2 * DIM) ** -0.5)
        self.bias = nn.Parameter(torch.randn(EXPERTS, DIM) * 0.1)

    def forward(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        top = chosen.shape[1]
        experts = chosen.reshape(-1)
        hidden = rows.repeat_interleave(top, dim=0)
        hidden = functional.gelu(torch.bmm(hidden[:, None], self.into[experts]))
        hidden = torch.bmm(hidden, self.out_of[experts]).squeeze(1) + self.bias[experts]
        return (hidden * weights.reshape(-1, 1)).view(-1, top, DIM).sum(1)


class Mixture(nn.Module):
    def __init__(self, favoured: int, top: int) -> None:
        super().__init__()
        self.top = top
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = Experts()
        self.register_buffer("favour", (torch.arange(EXPERTS) < favoured) * 9)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = (self.gate(rows) + self.favour).softmax(-1).topk(self.top)
        return self.experts(rows, chosen, weights).view_as(x)


class Block(nn.Module):
    def __init__(self, favoured: int, top: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
        self.ffn = Mixture(favoured, top)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x)).cumsum(1) / x.shape[1]
        return x + self.ffn(x)


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


def example_batch(microbatch_size: int, seq_len: int = 16) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (microbatch_size, seq_len + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())
