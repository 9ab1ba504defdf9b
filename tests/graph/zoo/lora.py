"""A Llama whose weights are frozen, with low-rank adapters that are trained."""

from decoder import Attention, Block, Decoder, SwiGLU, token_batch, token_loss
from torch import Tensor, nn

VOCABULARY = 128


class Adapted(nn.Module):
    """A frozen linear layer plus a trained product of two thin ones."""

    def __init__(self, base: nn.Linear, rank: int, scale: float):
        super().__init__()
        self.base, self.scale = base, scale
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * self.lora_b(self.lora_a(x))


def adapt(model: nn.Module, names: tuple[str, ...], rank: int, scale: float) -> nn.Module:
    """Freeze a model and put adapters on its linear layers of these names."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name in names:
            base = getattr(module, name, None)
            if isinstance(base, nn.Linear):
                setattr(module, name, Adapted(base, rank, scale))
    return model


def build_model() -> nn.Module:
    """A small model that trains in seconds on a CPU."""

    def block(_: int) -> Block:
        return Block(64, Attention(64, heads=8, kv_heads=4), SwiGLU(64, 192))

    model = Decoder(VOCABULARY, 64, layers=4, rotary_dim=8, make_block=block)
    return adapt(model, ("wq", "wv", "down"), rank=4, scale=2.0)


def example_batch(microbatch_size: int, seq_len: int = 32) -> tuple[Tensor, Tensor]:
    return token_batch(microbatch_size, seq_len, VOCABULARY)


loss_fn = token_loss
