"""A mixture-of-experts decoder that dispatches densely, as GShard and Switch do.

The router takes the best two of the experts for each token. Tokens go to their experts and come
back by products with one-hot tensors (tokens, experts, capacity): all shapes are known before.
"""

import torch
from decoder import Attention, Block, Decoder, token_batch, token_loss
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 128


class MixtureOfExperts(nn.Module):
    """Top-k routed experts with a fixed capacity."""

    def __init__(self, dim: int, hidden: int, experts: int, top_k: int, capacity_factor: float):
        super().__init__()
        self.experts, self.top_k, self.capacity_factor = experts, top_k, capacity_factor
        self.router = nn.Linear(dim, experts, bias=False)
        self.w_in = nn.Parameter(torch.empty(experts, dim, hidden).normal_(std=0.02))
        self.w_out = nn.Parameter(torch.empty(experts, hidden, dim).normal_(std=0.02))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        capacity = int(self.capacity_factor * self.top_k * tokens.shape[0] / self.experts)
        combine = self.route(tokens, capacity)
        dispatch = (combine > 0).to(x.dtype)
        queues = torch.einsum("tec,td->ecd", dispatch, tokens)
        made = torch.bmm(F.gelu(torch.bmm(queues, self.w_in)), self.w_out)
        return torch.einsum("tec,ecd->td", combine, made).view_as(x)

    def route(self, tokens: Tensor, capacity: int) -> Tensor:
        """Weight of each token in each slot of each expert, (tokens, experts, capacity)."""
        gates = torch.softmax(self.router(tokens).float(), dim=-1)
        weights, chosen = gates.topk(self.top_k, dim=-1)
        experts = torch.arange(self.experts, device=tokens.device)
        slots = torch.arange(capacity, device=tokens.device)
        one_hot = (chosen[..., None] == experts).to(gates.dtype)  # (tokens, k, experts)
        places = one_hot.flatten(0, 1).cumsum(0).view_as(one_hot) - 1
        in_slot = (places[..., None] == slots).to(gates.dtype)  # (tokens, k, experts, capacity)
        weighted = (weights[..., None] * one_hot)[..., None] * in_slot
        return weighted.sum(1).to(tokens.dtype)


def moe(
    vocabulary: int, dim: int, layers: int, heads: int, hidden: int, experts: int, top_k: int
) -> nn.Module:
    def block(_: int) -> Block:
        return Block(
            dim,
            Attention(dim, heads, heads // 2),
            MixtureOfExperts(dim, hidden, experts, top_k, capacity_factor=1.5),
        )

    return Decoder(vocabulary, dim, layers, dim // heads, block)


def build_model() -> nn.Module:
    """A small model that trains in seconds on a CPU."""
    return moe(VOCABULARY, dim=64, layers=4, heads=4, hidden=128, experts=4, top_k=2)


def example_batch(microbatch_size: int, seq_len: int = 32) -> tuple[Tensor, Tensor]:
    return token_batch(microbatch_size, seq_len, VOCABULARY)


loss_fn = token_loss
