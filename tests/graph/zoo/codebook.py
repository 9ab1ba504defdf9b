"""Features that the nearest codes replace: no gradient comes back to the distances."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Quantiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(32, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        codes = self.codes.weight[None].expand(len(x), -1, -1)
        distances = torch.cdist(torch.tanh(x), codes)  # what these keep is gone with them
        found = self.codes(distances.argmin(-1))
        loss = functional.mse_loss(found, x.detach()) + functional.mse_loss(x, found.detach())
        return x + (found - x).detach(), loss


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(x)))


class Rounding(Block):
    """Ends with scores of which only the highest counts; a checkpoint runs them all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        scores = functional.linear(torch.tanh(x), self.codes.to(x.dtype)).softmax(-1)
        found = self.codes.to(x.dtype)[scores.argmax(-1)]
        return x + (found - x).detach() * 0.1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.ModuleList(Block() for _ in range(2))
        self.quantiser = Quantiser()
        self.behind = nn.ModuleList((Block(), Rounding()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.before:
            x = block(x)
        x, loss = self.quantiser(x)
        for block in self.behind:
            x = block(x)
        return x, loss


def build_model() -> nn.Module:
    return Model()


def example_batch(microbatch_size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(microbatch_size, 24, 16), torch.randn(microbatch_size, 24, 16)


def loss_fn(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return functional.mse_loss(output[0], targets) + output[1]
