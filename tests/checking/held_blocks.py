"""Blocks that hold more, or less, than the ops of their graph tell at first sight."""

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

WIDTH, CLASSES, TOKENS = 512, 64, 256


class OwnGelu(Function):
    """With a backward of its own, in which much is made and freed."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        tanh = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
        slope = 0.5 * x * ((1 - tanh * tanh) * (0.79788456 + 0.1070322243 * x * x))
        return (slope + 0.5 * (1 + tanh)) * gradient


class Turned(nn.Module):
    """A weight of (in, out): backward reads the input transposed, not the weight."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return rows.view(*x.shape[:-1], -1)


class Norm(nn.Module):
    """Reads its input as another type alone, so that no op keeps the input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float64)
        normed = wide * wide.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
        return self.scale * normed.to(x.dtype)


class Layers(nn.Module):
    """Two linear layers with a function between them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        linear = Turned if kind == "turned" else nn.Linear
        self.up, self.down = linear(WIDTH, 2 * WIDTH), linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if self.kind == "named":
            z = y + 1.0  # no op keeps ``y``, which is there as long as it has a name
            return self.down(functional.gelu(z))
        return self.down(OwnGelu.apply(y) if self.kind == "own" else functional.gelu(y))


class Block(nn.Module):
    """Such layers behind a norm, and more of them beside."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.layers = Norm(), Layers(kind)
        self.beside = Layers(kind) if kind == "beside" else None
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "tail":
            y = self.layers(self.norm(x))
            # Large, and behind all that is saved: a recomputation ends before it.
            return x + (y - y.detach().unsqueeze(-1).repeat(1, 1, 1, 16).amax(-1))
        if self.beside is None:
            return x + self.layers(self.norm(x))
        normed = self.norm(x)
        return x + (self.layers(normed) + self.beside(normed))


class Model(nn.Module):
    """Four of them, and few classes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def plain() -> Model:
    return Model("plain")


def turned() -> Model:
    return Model("turned")


def own() -> Model:
    return Model("own")


def named() -> Model:
    return Model("named")


def tail() -> Model:
    return Model("tail")


def beside() -> Model:
    return Model("beside")


def example_batch(batch_size: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(CLASSES, (batch_size, TOKENS + 1))
    return ids[:, :-1], ids[:, 1:]


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.view(-1, CLASSES), targets.reshape(-1))
