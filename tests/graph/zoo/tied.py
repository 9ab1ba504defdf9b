"""A decoder with tied weights: embedding and head, and each feed-forward layer in two blocks."""

from decoder import Attention, Block, Decoder, SwiGLU, token_batch, token_loss
from torch import Tensor, nn

VOCABULARY = 128


def build_model() -> nn.Module:
    """A small model that trains in seconds on a CPU."""

    def block(_: int) -> Block:
        return Block(64, Attention(64, heads=4, kv_heads=4), SwiGLU(64, 128))

    model = Decoder(VOCABULARY, 64, layers=4, rotary_dim=16, make_block=block)
    model.head.weight = model.embed.weight
    for first, second in zip(model.layers[::2], model.layers[1::2], strict=True):
        for name in ("gate", "up", "down"):
            getattr(second.feed_forward, name).weight = getattr(first.feed_forward, name).weight
    return model


def example_batch(microbatch_size: int, seq_len: int = 32) -> tuple[Tensor, Tensor]:
    return token_batch(microbatch_size, seq_len, VOCABULARY)


loss_fn = token_loss
