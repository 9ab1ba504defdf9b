"""A mixture that lists how many rows each expert gets, and finds its experts by their names.

Its table has a second name, that of a module which never runs; a mask is made in place.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, DIM, EXPERTS, BLOCKS = 128, 32, 4, 4


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleDict(
            {
                f"expert_{i}": nn.Sequential(
                    nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM)
                )
                for i in range(EXPERTS)
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.gate(rows).softmax(-1).topk(2)
        order = chosen.flatten().argsort(stable=True)
        sizes = functional.one_hot(chosen.flatten(), EXPERTS).sum(0).tolist()  # LISTED
        sorted_rows = rows[order // 2].split(sizes)
        out = [
            self.experts[f"expert_{number}"](sorted_rows[number])  # NAMED
            for number in torch.arange(EXPERTS)
        ]
        done = torch.cat(out) * weights.flatten()[order, None]
        return torch.zeros_like(rows).index_add(0, order // 2, done).view_as(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM)
        self.down, self.ffn = nn.Linear(4 * DIM, DIM), Experts()

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        x = x + self.down(functional.gelu(self.up(self.norm(x))))
        if not seen.all():
            x = torch.cat([x[:, :1], x[seen].unflatten(0, (len(x), -1))], 1)
        return x + self.ffn(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.embed = (nn.Embedding(VOCABULARY, DIM) for _ in range(2))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        self.embed.weight = self.head.weight = self.shared.weight

    def forward(self, tokens: Tensor) -> Tensor:
        seen = torch.ones(tokens.shape, dtype=torch.bool, device=tokens.device)
        seen[:, 0] = False
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, seen)
        return self.head(x)


def build_model() -> nn.Module:
    return Model()


def example_batch(microbatch_size: int, seq_len: int = 16) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (microbatch_size, seq_len + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())
