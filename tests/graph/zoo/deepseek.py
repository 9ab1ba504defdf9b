"""A DeepSeek-like decoder: latent attention, dense and routed blocks that alternate.

Queries and keys are wider than values. Routed blocks have a shared expert and routed ones; tokens
are sent by index to slots of a fixed capacity, those beyond it to a slot that is thrown away.
"""

import torch
from decoder import Block, Decoder, SwiGLU, rotate, token_batch, token_loss
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 128


class LatentAttention(nn.Module):
    """Keys and values from a narrow latent; part of each key is rotary and common to all heads."""

    def __init__(self, dim: int, heads: int, latent: int, plain: int, rotary: int, value: int):
        super().__init__()
        self.heads, self.latent, self.plain, self.rotary = heads, latent, plain, rotary
        self.value = value
        self.wq = nn.Linear(dim, heads * (plain + rotary), bias=False)
        self.down = nn.Linear(dim, latent + rotary, bias=False)
        self.norm = nn.RMSNorm(latent)
        self.up = nn.Linear(latent, heads * (plain + value), bias=False)
        self.wo = nn.Linear(heads * value, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        size, length, _ = x.shape
        q = self.wq(x).view(size, length, self.heads, -1).transpose(1, 2)
        q_plain, q_rotary = q.split([self.plain, self.rotary], dim=-1)
        latent, k_rotary = self.down(x).split([self.latent, self.rotary], dim=-1)
        kv = self.up(self.norm(latent)).view(size, length, self.heads, -1).transpose(1, 2)
        k_plain, v = kv.split([self.plain, self.value], dim=-1)
        k_rotary = rotate(k_rotary.unsqueeze(1), cos, sin).expand(-1, self.heads, -1, -1)
        q = torch.cat([q_plain, rotate(q_rotary, cos, sin)], dim=-1)
        k = torch.cat([k_plain, k_rotary], dim=-1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(size, length, -1))


class RoutedExperts(nn.Module):
    """One expert for all tokens and the best k of the others, gated by a sigmoid."""

    def __init__(self, dim: int, hidden: int, experts: int, top_k: int):
        super().__init__()
        self.experts, self.top_k = experts, top_k
        self.shared = SwiGLU(dim, hidden)
        self.router = nn.Linear(dim, experts, bias=False)
        self.w_gate = nn.Parameter(torch.empty(experts, dim, hidden).normal_(std=0.02))
        self.w_up = nn.Parameter(torch.empty(experts, dim, hidden).normal_(std=0.02))
        self.w_down = nn.Parameter(torch.empty(experts, hidden, dim).normal_(std=0.02))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        gates = torch.sigmoid(self.router(tokens).float())
        weights, chosen = gates.topk(self.top_k, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        capacity = 2 * self.top_k * tokens.shape[0] // self.experts
        slots = self.slots(chosen.flatten(), capacity)
        sent = tokens.repeat_interleave(self.top_k, dim=0)
        queues = tokens.new_zeros(self.experts * capacity + 1, tokens.shape[1])
        queues = queues.index_copy(0, slots, sent)
        made = self.run(queues[:-1].view(self.experts, capacity, -1)).flatten(0, 1)
        made = torch.cat([made, made.new_zeros(1, made.shape[1])])
        back = made[slots].view(-1, self.top_k, tokens.shape[1])
        return self.shared(x) + (weights[..., None] * back).sum(1).view_as(x)

    def slots(self, chosen: Tensor, capacity: int) -> Tensor:
        """Row of the queues for each choice, the last row where its expert is full."""
        experts = torch.arange(self.experts, device=chosen.device)
        one_hot = chosen[:, None] == experts
        place = (one_hot.cumsum(0) * one_hot).sum(1) - 1
        row = chosen * capacity + place
        return torch.where(place < capacity, row, self.experts * capacity)

    def run(self, queues: Tensor) -> Tensor:
        hidden = F.silu(torch.bmm(queues, self.w_gate)) * torch.bmm(queues, self.w_up)
        return torch.bmm(hidden, self.w_down)


def deepseek(vocabulary: int, dim: int, layers: int, heads: int, experts: int) -> nn.Module:
    def block(layer: int) -> Block:
        attention = LatentAttention(dim, heads, latent=dim // 2, plain=16, rotary=8, value=16)
        if layer % 2 == 0:
            return Block(dim, attention, SwiGLU(dim, 3 * dim))
        return Block(dim, attention, RoutedExperts(dim, dim, experts, top_k=2))

    return Decoder(vocabulary, dim, layers, 8, block)


def build_model() -> nn.Module:
    """A small model that trains in seconds on a CPU."""
    return deepseek(VOCABULARY, dim=64, layers=4, heads=4, experts=8)


def example_batch(microbatch_size: int, seq_len: int = 32) -> tuple[Tensor, Tensor]:
    return token_batch(microbatch_size, seq_len, VOCABULARY)


loss_fn = token_loss
