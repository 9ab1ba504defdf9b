"""Models drawn at random: blocks and other modules that read each other's outputs in any way."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor, nn

WIDTH = 6


class Block(nn.Module):
    """Mixes its arguments; may return two tensors, the second an argument that it hands on."""

    def __init__(self, draw: random.Random):
        super().__init__()
        self.num_arguments = draw.choice((1, 1, 2, 3))
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(self.num_arguments)])
        self.form = draw.choice(("tensor", "tensor", "tuple", "nested"))
        self.handed_on = draw.choice((None, *range(self.num_arguments)))

    def forward(self, *arguments: Tensor) -> object:
        made = sum(torch.tanh(layer(x)) for layer, x in zip(self.layers, arguments, strict=True))
        if self.form == "tensor":
            return made
        second = torch.cos(made) if self.handed_on is None else arguments[self.handed_on]
        return (made, second) if self.form == "tuple" else {"made": made, "more": (None, [second])}

    def tensors(self, output) -> Sequence[Tensor]:
        if self.form == "tensor":
            return (output,)
        return output if self.form == "tuple" else (output["made"], output["more"][1][0])


class RandomModel(nn.Module):
    """A list of steps over a growing row of tensors, the last of which blocks mostly read."""

    def __init__(self, seed: int):
        super().__init__()
        draw = random.Random(seed)
        self.stem, self.twice = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head, self.scale = nn.Linear(WIDTH, 1), nn.Parameter(torch.rand(WIDTH))
        self.blocks, self.outer = nn.ModuleList(), nn.ModuleList()
        self.steps: list[tuple[str, int, list[int]]] = []
        self.num_tensors, self.last = 2, 1
        for _ in range(draw.randint(2, 5)):
            self.add_outer_steps(draw)
            self.add_block(draw)
        self.add_outer_steps(draw)
        self.read_at_end = [self.last, draw.randrange(self.num_tensors)]
        if draw.random() < 0.4:  # as with adapters
            for module in (self.stem, *self.blocks, *self.outer):
                module.requires_grad_(draw.random() < 0.6)

    def add_outer_steps(self, draw: random.Random) -> None:
        kinds = ("outer", "outer", "sin", "add", "add", "add_in_place", "activation")
        for _ in range(draw.choice((0, 0, 1, 2, 3))):
            kind = draw.choice((*kinds, draw.choice(("twice", "scale"))))
            if kind in ("outer", "add_in_place", "activation"):
                self.outer.append(nn.Tanh() if kind == "activation" else nn.Linear(WIDTH, WIDTH))
            read = [draw.randrange(self.num_tensors) for _ in range(2)]
            self.steps.append((kind, len(self.outer) - 1, read))
            self.num_tensors += 1

    def add_block(self, draw: random.Random) -> None:
        block = Block(draw)
        read = [draw.randrange(self.num_tensors) for _ in range(block.num_arguments)]
        if draw.random() < 0.75:
            read[0] = self.last
        self.steps.append(("block", len(self.blocks), read))
        self.blocks.append(block)
        self.last = self.num_tensors
        self.num_tensors += 1 if block.form == "tensor" else 2

    def forward(self, x: Tensor) -> Tensor:
        row = [x, self.stem(x)]
        for kind, index, read in self.steps:
            arguments = [row[position] for position in read]
            if kind == "block":
                block = self.blocks[index]
                row.extend(block.tensors(block(*arguments)))
            else:
                row.append(self.outer_step(kind, index, *arguments))
        return self.head(sum(row[position] for position in self.read_at_end))

    def outer_step(self, kind: str, index: int, x: Tensor, y: Tensor) -> Tensor:
        if kind == "sin":
            return torch.sin(x)
        if kind == "add":
            return x + y
        if kind == "scale":
            return x * self.scale
        if kind == "twice":
            return self.twice(x)
        made = self.outer[index](x)
        if kind == "add_in_place":
            made += y
        return made


def batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), torch.randn(size, 1)


def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean()
