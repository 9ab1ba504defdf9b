"""The transformer that a measured run trained, as a module that is traced like any other.

Only what a kernel or a byte depends on is here: which matmuls, which norms, what the loss is.
Attention is always written fused; ``KernelForms`` says how a framework computes it. Weights are
never drawn; the modules are built on meta.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.graph.loading.load import wrap_module
from planner.graph.loading.loaded_model import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Dimensions of a dense decoder, and how its framework computes it."""

    layers: int
    """Blocks."""
    hidden: int
    """Width of the residual stream."""
    ffn: int
    """Inner width of the MLP."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads."""
    vocab_size: int
    """Rows of the embedding."""
    seq_len: int
    """Tokens per sequence."""
    gated: bool
    """Gated MLP (three matrices), RMSNorm, rotary positions, no biases: Llama. Otherwise GELU,
    LayerNorm, learned positions: GPT."""
    biases: bool
    """Linear layers have biases."""
    learned_positions: bool
    """Positions are an embedding (ALiBi and rotary have none)."""
    tied: bool
    """Embedding and head are one weight."""
    dropout: float
    """Dropout on attention weights and after each half block."""
    plain_torch: bool = False
    """Norms, rotary positions and shared key heads are written in plain torch, several kernels
    each, and every projection is a matmul of its own."""


class _Attention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.head_dim = shape.hidden // shape.heads
        kv_width = shape.kv_heads * self.head_dim
        widths = (shape.heads * self.head_dim, kv_width, kv_width)
        self.qkv = _Projections(shape, widths, joined=not shape.plain_torch)
        self.out = nn.Linear(widths[0], shape.hidden, bias=shape.biases)

    def forward(self, x: Tensor, rotary: Tensor | None) -> Tensor:
        batch, tokens, _ = x.shape
        query, key, value = (
            part.view(batch, tokens, -1, self.head_dim).transpose(1, 2) for part in self.qkv(x)
        )
        if rotary is not None:
            query, key = self._rotated(query, rotary), self._rotated(key, rotary)
        grouped = self.shape.kv_heads < self.shape.heads
        if grouped and self.shape.plain_torch:
            key, value = self._repeated(key), self._repeated(value)
            grouped = False
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=self.shape.dropout, enable_gqa=grouped
        )
        mixed = self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        return F.dropout(mixed, self.shape.dropout) if self.shape.dropout else mixed

    def _rotated(self, x: Tensor, rotary: Tensor) -> Tensor:
        """One kernel, or a conversion to float32, a product and the conversion back."""
        if not self.shape.plain_torch:
            return x * rotary
        return (x.float() * rotary).to(x.dtype)

    def _repeated(self, x: Tensor) -> Tensor:
        """Keys or values (batch, kv heads, tokens, head dim), copied for every query head."""
        batch, kv_heads, tokens, head_dim = x.shape
        times = self.shape.heads // kv_heads
        wide = x[:, :, None].expand(batch, kv_heads, times, tokens, head_dim)
        return wide.reshape(batch, kv_heads * times, tokens, head_dim)


class _Projections(nn.Module):
    """Several projections of one input: one matmul whose output is split, or one each."""

    def __init__(self, shape: ModelShape, widths: Sequence[int], *, joined: bool) -> None:
        super().__init__()
        self.widths = tuple(widths)
        outs = (sum(self.widths),) if joined else self.widths
        self.weights = nn.ModuleList(
            [nn.Linear(shape.hidden, out, bias=shape.biases) for out in outs]
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        if len(self.weights) > 1:
            return tuple(weight(x) for weight in self.weights)
        return self.weights[0](x).split(self.widths, dim=-1)  # type: ignore[no-any-return]


class _Mlp(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.dropout = shape.dropout
        self.gated = shape.gated
        widths = (shape.ffn, shape.ffn) if shape.gated else (shape.ffn,)
        self.up = _Projections(shape, widths, joined=not shape.plain_torch)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=shape.biases)

    def forward(self, x: Tensor) -> Tensor:
        out = self.down(self._activated(self.up(x)))
        return F.dropout(out, self.dropout) if self.dropout else out

    def _activated(self, up: tuple[Tensor, ...]) -> Tensor:
        return F.silu(up[0]) * up[1] if self.gated else F.gelu(up[0])


class _Block(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = _norm(shape)
        self.attention = _Attention(shape)
        self.mlp_norm = _norm(shape)
        self.mlp = _Mlp(shape)

    def forward(self, x: Tensor, rotary: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class _PlainRmsNorm(nn.Module):
    """RMSNorm as six kernels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return scaled.to(x.dtype) * self.weight


def _norm(shape: ModelShape) -> nn.Module:
    if not shape.gated:
        return nn.LayerNorm(shape.hidden)
    return _PlainRmsNorm(shape.hidden) if shape.plain_torch else nn.RMSNorm(shape.hidden)


class Decoder(nn.Module):
    """A dense decoder; returns logits of shape (batch, tokens, vocabulary)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocab_size, shape.hidden)
        self.positions = (
            nn.Embedding(shape.seq_len, shape.hidden) if shape.learned_positions else None
        )
        self.blocks = nn.ModuleList([_Block(shape) for _ in range(shape.layers)])
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.hidden, shape.vocab_size, bias=False)
        if shape.tied:
            self.head.weight = self.tokens.weight
        angles = torch.ones(shape.seq_len, shape.hidden // shape.heads)
        self.register_buffer("angles", angles, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of token ids (batch, tokens)."""
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        rotary = None
        if self.shape.gated:
            rotary = self.angles.float() if self.shape.plain_torch else self.angles.to(x.dtype)
        if self.shape.dropout:
            x = F.dropout(x, self.shape.dropout)
        for block in self.blocks:
            x = block(x, rotary)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(shape: ModelShape) -> nn.Module:
    """Build the module on the current default device."""
    return Decoder(shape)


def example_batch(shape: ModelShape, microbatch_size: int) -> tuple[Tensor, Tensor]:
    """Token ids and targets of a microbatch, (microbatch_size, seq_len) each."""
    ids = torch.zeros(microbatch_size, shape.seq_len, dtype=torch.long)
    return ids, ids


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of the next token, a scalar; mixed precision computes it in float32."""
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def loaded(shape: ModelShape) -> LoadedModel:
    """The model as the tracer takes it."""
    return wrap_module(
        partial(build, shape),
        example_batch=partial(example_batch, shape),
        loss_fn=loss,
        seq_len=None,
    )
