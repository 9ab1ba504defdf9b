"""Rows that a mask of the tokens chooses get a projection of their own, before the blocks."""

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, DIM, BLOCKS, CHOSEN = 64, 32, 4, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(DIM),
            nn.Linear(DIM, 4 * DIM),
            nn.Linear(4 * DIM, DIM),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.project = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.LayerNorm(DIM))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(DIM, VOCABULARY)

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.embed(tokens)
        chosen = tokens < CHOSEN
        rows = self.project(embedded[chosen])
        x = embedded.clone()
        x[chosen] = rows
        for block in self.blocks:
            x = self.run(block, x)
        return self.finish(x, rows, chosen)

    def finish(self, x: Tensor, rows: Tensor, chosen: Tensor) -> Tensor:
        return self.head(x)


class ReadAgain(Model):
    """Reads the rows behind the blocks again."""

    def finish(self, x: Tensor, rows: Tensor, chosen: Tensor) -> Tensor:
        x = x.clone()
        x[chosen] += rows
        return self.head(x)


class Packed(Model):
    """Runs its blocks on the chosen rows alone."""

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.embed(tokens)
        chosen = tokens > CHOSEN
        x = embedded[chosen]
        for block in self.blocks:
            x = block(x)
        whole = torch.zeros_like(embedded)
        whole[chosen] = x
        return self.head(whole)


class Constant(Model):
    """Runs its blocks on rows that are the same in each batch."""

    def forward(self, tokens: Tensor) -> Tensor:
        kept = torch.arange(tokens.shape[1], device=tokens.device) % 2 == 0
        x = self.embed(tokens)[:, kept]
        for block in self.blocks:
            x = block(x)
        return self.head(x).repeat_interleave(2, dim=1)


class Recomputed(Model):
    """Recomputes its blocks by itself."""

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)


def build_model() -> nn.Module:
    return Model()


def build_read_again() -> nn.Module:
    return ReadAgain()


def build_packed() -> nn.Module:
    return Packed()


def build_constant() -> nn.Module:
    return Constant()


def build_recomputed() -> nn.Module:
    return Recomputed()


def example_batch(microbatch_size: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (microbatch_size, 17))
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
