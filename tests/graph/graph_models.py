"""Small models with what tracing must get right, and helpers to load them."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.graph.loading.load import load_model, wrap_module
from planner.graph.loading.loaded_model import LoadedModel

EXAMPLES = Path(__file__).parents[2] / "examples"
ZOO = Path(__file__).parent / "zoo"


def example(name: str, *, folder: Path = EXAMPLES, seq_len: int | None = None) -> LoadedModel:
    return load_model(str(folder / name), seq_len=seq_len)


def wrap(factory, batch, loss_fn=None) -> LoadedModel:
    return wrap_module(factory, example_batch=batch, loss_fn=loss_fn)


def vectors(width: int):
    return lambda size: (torch.randn(size, width), None)


def images(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, 16, 16), torch.randint(0, 5, (size,))


def mean_square(output: Tensor, _: object) -> Tensor:
    return output.float().pow(2).mean()


class ConvNet(nn.Module):
    """Grouped, depthwise and transposed convolutions, batch norm, an in-place activation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.grouped = nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=4)
        self.up = nn.ConvTranspose2d(16, 4, 2, 2, groups=2)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.stem(x)), inplace=True)
        x = self.up(self.grouped(self.depthwise(x)))
        return self.head(x.mean((2, 3)))


class EagerBlock(nn.Module):
    """Attention written out, dropout-free, with a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        size, length, width = x.shape
        qkv = self.qkv(self.norm(x)).view(size, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = torch.softmax(q @ k.transpose(-2, -1) * 0.5, dim=-1)
        return x + self.proj((scores @ v).transpose(1, 2).reshape(size, length, width))


class Stream(nn.Module):
    """Blocks in a list between an embedding and a head that may be tied."""

    def __init__(self, *, tied: bool = True, blocks: int = 3, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.blocks = nn.ModuleList([EagerBlock(width, 2) for _ in range(blocks)])
        self.head = nn.Linear(width, 32, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tokens(size: int) -> tuple[Tensor, Tensor]:
    made = torch.randint(0, 32, (size, 9))
    return made[:, :-1], made[:, 1:]


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
