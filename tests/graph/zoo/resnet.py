"""A ResNet of bottleneck blocks: convolutions, batch norms, in-place ReLUs and additions."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NUM_CLASSES = 10


class Bottleneck(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, 4 * channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or channels_in != 4 * channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, 4 * channels, 1, stride, bias=False),
                nn.BatchNorm2d(4 * channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        x += shortcut
        return self.relu(x)


class ResNet(nn.Module):
    def __init__(self, width: int, depths: tuple[int, ...], num_classes: int):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        blocks: list[nn.Module] = []
        channels_in = width
        for stage, depth in enumerate(depths):
            channels = width * 2**stage
            for position in range(depth):
                stride = 2 if stage > 0 and position == 0 else 1
                blocks.append(Bottleneck(channels_in, channels, stride))
                channels_in = 4 * channels
        self.blocks = nn.Sequential(*blocks)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels_in, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        return self.fc(torch.flatten(self.avgpool(self.blocks(x)), 1))


def build_model() -> nn.Module:
    """A small model that trains in seconds on a CPU."""
    return ResNet(width=8, depths=(2, 2, 1), num_classes=NUM_CLASSES)


def resnet_50() -> nn.Module:
    """25.6M parameters."""
    return ResNet(width=64, depths=(3, 4, 6, 3), num_classes=1000)


def example_batch(microbatch_size: int) -> tuple[Tensor, Tensor]:
    images = torch.randn(microbatch_size, 3, 64, 64)
    return images, torch.randint(0, NUM_CLASSES, (microbatch_size,))


def loss_fn(scores: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(scores, classes)
