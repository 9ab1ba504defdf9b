"""Layers that multiply frequencies with weights of complex numbers, or with these as pairs."""

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, POINTS, MODES = 16, 64, 8


class Spectral(nn.Module):
    def __init__(self, *, pairs: bool) -> None:
        super().__init__()
        weight = torch.randn(WIDTH, WIDTH, MODES, dtype=torch.complex64) / WIDTH
        self.weight = nn.Parameter(torch.view_as_real(weight) if pairs else weight)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        heard = torch.fft.rfft(x)[..., :MODES]
        made = torch.einsum("bix,iox->box", heard, weight)
        return torch.fft.irfft(functional.pad(made, (0, POINTS // 2 + 1 - MODES)), n=POINTS)


class Block(nn.Module):
    def __init__(self, *, pairs: bool) -> None:
        super().__init__()
        self.spectral, self.beside = Spectral(pairs=pairs), nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(self.spectral(x) + self.beside(x))


class Operator(nn.Module):
    def __init__(self, *, pairs: bool) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv1d(1, WIDTH, 1), nn.Conv1d(WIDTH, 1, 1)
        self.blocks = nn.ModuleList(Block(pairs=pairs) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def build_model() -> nn.Module:
    return Operator(pairs=False)


def build_of_pairs() -> nn.Module:
    return Operator(pairs=True)


def example_batch(microbatch_size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(microbatch_size, 1, POINTS), torch.randn(microbatch_size, 1, POINTS)


def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(output, targets)
