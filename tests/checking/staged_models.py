"""Models of few blocks for pipelines: blocks that cast their input, brief ones, a keeping one."""

import torch
from torch import Tensor, nn
from torch.nn import functional

TOKENS, LENGTH = 64, 512


class Casting(nn.Module):
    """Reads its input in another dtype, and for the sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.layer_norm(x.float(), x.shape[-1:]).to(x.dtype) * self.norm.weight
        return x + self.down(functional.gelu(self.up(y)))


class Brief(nn.Module):
    """Takes much for a while, and keeps little."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 128 * width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(x).mean(-1, keepdim=True)


class Keeping(nn.Module):
    """Keeps much."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 16 * width), nn.Linear(16 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        for _ in range(4):
            y = functional.gelu(y)
        return x + self.down(y)


class Biased(nn.Module):
    """Adds what it is given to its scores, and does not keep it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ends = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k = self.ends(x).chunk(2, -1)
        return x + torch.softmax(q @ k.mT - bias, -1) @ x


class Distances(nn.Module):
    """Makes a table of its inputs, which the code holds as long as it runs blocks."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList([Biased(width) for _ in range(blocks)])
        self.head = nn.Linear(width, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        places = tokens[..., None].float()
        bias = torch.cdist(places, places)
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x, bias)
        return self.head(x)


class Model(nn.Module):
    """Blocks in a row."""

    def __init__(self, width: int, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def casting() -> Model:
    return Model(256, [Casting(256) for _ in range(8)])


def keeping_last() -> Model:
    return Model(64, [Brief(64), Brief(64), Brief(64), Keeping(64)])


def distances() -> Distances:
    return Distances(64, 4)


def example_batch(batch_size: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(TOKENS, (batch_size, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
