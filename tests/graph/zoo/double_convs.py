"""U-Nets whose layers are lists: each convolution with its norm and an activation in place."""

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTHS = ((16, 32), (32, 64), (64, 128))


class DoubleConv(nn.Module):
    """Two layers, all of them children of one list."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Down(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.pooled = nn.Sequential(nn.MaxPool2d(2), DoubleConv(width, out))

    def forward(self, x: Tensor) -> Tensor:
        return self.pooled(x)


class Up(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.larger = nn.ConvTranspose2d(width, out, 2, 2)
        self.conv = DoubleConv(2 * out, out)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        larger = self.larger(x)  # is there until this returns
        return self.conv(torch.cat([skip, larger], 1))


class UNet(nn.Module):
    """Blocks that are attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = DoubleConv(3, 16)
        self.down1, self.down2, self.down3 = (Down(*widths) for widths in WIDTHS)
        self.up1, self.up2, self.up3 = (Up(*widths[::-1]) for widths in reversed(WIDTHS))
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, image: Tensor) -> Tensor:
        whole = self.first(image)
        half = self.down1(whole)
        quarter = self.down2(half)
        x = self.up1(self.down3(quarter), quarter)
        return self.head(self.up3(self.up2(x, half), whole))


class Halves(nn.Module):
    """The same in lists."""

    def __init__(self) -> None:
        super().__init__()
        self.first = DoubleConv(3, 16)
        self.downs = nn.ModuleList(Down(*widths) for widths in WIDTHS)
        self.ups = nn.ModuleList(Up(*widths[::-1]) for widths in reversed(WIDTHS))
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, image: Tensor) -> Tensor:
        x, skips = self.first(image), []
        for down in self.downs:
            skips.append(x)
            x = down(x)
        for up in self.ups:
            x = up(x, skips.pop())
        return self.head(x)


def layer(width: int, out: int) -> nn.Module:
    norm = nn.GroupNorm(4, out)
    return nn.Sequential(nn.Conv2d(width, out, 3, padding=1), norm, nn.ReLU(inplace=True))


class Stage(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.a, self.b = layer(width, out), layer(out, out)

    def forward(self, x: Tensor) -> Tensor:
        return functional.max_pool2d(self.b(self.a(x)), 2)


class Stages(nn.Module):
    """Each layer a list of its own, two of them in a child of the outer list."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Stage(*widths) for widths in ((3, 16), *WIDTHS[:2]))
        self.head = nn.Linear(64, 4)

    def forward(self, image: Tensor) -> Tensor:
        for stage in self.stages:
            image = stage(image)
        return self.head(image.mean((2, 3)))


def unet() -> nn.Module:
    return UNet()


def halves() -> nn.Module:
    return Halves()


def stages() -> nn.Module:
    return Stages()


def example_batch(microbatch_size: int) -> tuple[Tensor, None]:
    return torch.randn(microbatch_size, 3, 32, 32), None


def loss_fn(output: Tensor, _: None) -> Tensor:
    return output.square().mean()
