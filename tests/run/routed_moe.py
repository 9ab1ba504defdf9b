"""A mixture of experts that looks for the tokens of each, as Mixtral's first code did."""

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, DIM, EXPERTS, BLOCKS = 128, 32, 4, 4


class Experts(nn.Module):
    """Sends each token to its two best experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
            for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.gate(tokens).softmax(-1).topk(2)
        out = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == i)  # HINTED
            out = out.index_add(0, rows, weights[rows, place, None] * expert(tokens[rows]))
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.ffn = nn.LayerNorm(DIM), nn.Linear(DIM, DIM), Experts()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x)).cumsum(1) / x.shape[1]
        if x.abs().amax() > 1e6:  # ASKED
            x = x / 2
        return x + self.ffn(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
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
