"""A mixture of experts whose blocks go on after their experts."""

from routed_attention import Block, Model, example_batch, loss_fn
from torch import Tensor, nn

__all__ = ["build_model", "example_batch", "loss_fn"]


class ExpertsFirst(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ffn(self.second_norm(x))
        return x + self.attention(self.first_norm(x))


def build_model() -> nn.Module:
    model = Model()
    for block in model.blocks:
        block.__class__ = ExpertsFirst
    return model
