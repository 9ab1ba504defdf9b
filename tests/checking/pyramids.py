"""Blocks that get narrower and deeper: the first keep most, the last have most parameters."""

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, CLASSES, SIZE = 48, 100, 128
LEFT_OUT = 0.1


class Mixing(nn.Module):
    """A wide convolution of each channel, and two layers over channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.over_space = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.over_space(x).permute(0, 2, 3, 1))
        return x + self.down(functional.gelu(self.up(y))).permute(0, 3, 1, 2)


class Halving(nn.Module):
    """Half the height and width, twice the channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(1, width), nn.Conv2d(width, 2 * width, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.norm(x))


class Residual(nn.Module):
    """Two convolutions, whose output is kept by the block that makes it too."""

    def __init__(self, width: int, out: int, more: int = 0) -> None:
        super().__init__()
        stride, inner = 1 if width == out else 2, out + more
        self.first = nn.Conv2d(width, inner, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(inner, out, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(each) for each in (inner, out))
        self.beside = nn.Conv2d(width, out, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norms[0](self.first(x)))
        return functional.relu(self.norms[1](self.second(y)) + self.beside(x))


class Pyramid(nn.Module):
    """Blocks in a row."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 4, 4)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(8 * WIDTH, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Drawn(Pyramid):
    """Blocks that draws may leave out: no stage may begin behind one."""

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        for block in self.blocks:
            if torch.rand(()) >= LEFT_OUT:
                x = block(x)
        return self.head(x.mean((2, 3)))


def mixing() -> Pyramid:
    blocks: list[nn.Module] = []
    for stage, number in enumerate((2, 2, 4, 2)):
        width = WIDTH << stage
        blocks += [Halving(width // 2)] if stage else []
        blocks += [Mixing(width) for _ in range(number)]
    return Pyramid(blocks)


def rectified() -> Pyramid:
    """Functions that write to what the block before has made are blocks of their own."""
    blocks: list[nn.Module] = []
    for stage in range(4):
        width = WIDTH << stage
        blocks += [nn.Conv2d(width // 2 if stage else width, width, 3, padding=1)]
        blocks += [nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return Pyramid(blocks)


def residual() -> Pyramid:
    return Pyramid(residuals())


def drawn() -> Pyramid:
    return Drawn(residuals())


def uneven() -> Pyramid:
    """No two blocks are alike, and each keeps what the one behind it reads."""
    blocks: list[nn.Module] = []
    for stage in range(4):
        width = WIDTH << stage
        widths = [width // 2 if stage else width, *[width] * 3]
        blocks += [Residual(each, width, 8 * at) for at, each in enumerate(widths, len(blocks))]
    return Pyramid(blocks)


def residuals() -> list[nn.Module]:
    blocks: list[nn.Module] = []
    for stage in range(4):
        width = WIDTH << stage
        blocks += [Residual(width // 2 if stage else width, width), Residual(width, width)]
    return blocks


def example_batch(batch_size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch_size, 3, SIZE, SIZE), torch.randint(CLASSES, (batch_size,))


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits, targets)
