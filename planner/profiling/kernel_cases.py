"""The ops that are timed: those of transformer layers, the most telling first in each group."""

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from planner.profiling.kernels import Built, KernelCase


def kernel_groups(*, smoke: bool) -> list[list[KernelCase]]:
    """List the cases by group."""
    if smoke:
        return [
            [linear("float32", 32, 48, 64), linear("bfloat16", 33, 65, 40, bias=True)],
            [scores("float32", 4, 32, 16)],
            [attention("float32", 1, 4, 2, 64, 16, causal=causal) for causal in (True, False)],
            [layer_norm("float32", 32, 64), rms_norm("float32", 32, 64)],
            [gelu("float32", 32, 64), silu_mul("float32", 32, 64), add("float32", 32, 64)],
            [dropout("float32", 32, 64), embedding("float32", 32, 128, 64)],
            [cross_entropy(32, 128), adamw(4096)],
        ]
    return [
        list(_linears()),
        list(_products()),
        list(_attentions()),
        list(_rowwise()),
        list(_tables()),
    ]


# -- shapes ---------------------------------------------------------------------------------------


def _linears() -> Iterator[KernelCase]:
    """Projections of layers, whole and split over tp ranks, odd sizes, other dtypes."""
    for tokens, hidden in product((8192, 2048), (4096, 1024, 2048, 8192, 5120)):
        for wide in (3 * hidden, hidden, 4 * hidden):
            yield linear("bfloat16", tokens, wide, hidden)
        yield linear("bfloat16", tokens, hidden, 4 * hidden)
    for hidden, ffn in ((4096, 14336), (5120, 13824), (8192, 28672), (4096, 11008)):
        yield linear("bfloat16", 4096, ffn, hidden)
        yield linear("bfloat16", 4096, hidden, ffn)
    for tokens, vocab in ((4096, 32000), (4096, 128256), (2048, 50257), (1024, 256000)):
        yield linear("bfloat16", tokens, vocab, 4096)
    for tp, tokens in product((2, 4, 8), (2048, 8192)):
        yield linear("bfloat16", tokens, 3 * 4096 // tp, 4096)
        yield linear("bfloat16", tokens, 4096, 4096 // tp)
        yield linear("bfloat16", tokens, 4 * 4096 // tp, 4096, bias=True)
        yield linear("bfloat16", tokens, 4096, 4 * 4096 // tp)
    for tokens, wide, deep in (
        *((8192, 4800, 1600), (8192, 1600, 6400), (2047, 4096, 4096), (1000, 3000, 1000)),
        *((8191, 4097, 1023), (4096, 5119, 2049), (300, 768, 768), (16384, 2560, 2560)),
        *((128, 4096, 4096), (512, 1024, 1024), (32768, 1024, 1024), (65536, 768, 768)),
    ):
        yield linear("bfloat16", tokens, wide, deep)
    for dtype, tokens, hidden in product(("float16", "float32"), (2048, 4096), (1024, 2048, 4096)):
        yield linear(dtype, tokens, 4 * hidden, hidden)
        yield linear(dtype, tokens, hidden, hidden)


def _products() -> Iterator[KernelCase]:
    """The two products of attention that is not fused."""
    for batch, length, head_dim in (
        *((64, 2048, 128), (128, 1024, 64), (32, 4096, 128), (16, 512, 64)),
        *((64, 2048, 80), (96, 1000, 64), (256, 512, 64), (8, 8192, 128)),
    ):
        yield scores("bfloat16", batch, length, head_dim)
        yield context("bfloat16", batch, length, head_dim)
    yield scores("float32", 32, 1024, 64)
    yield scores("float16", 64, 2048, 128)


def _attentions() -> Iterator[KernelCase]:
    """Fused attention, 16,384 tokens in all but the smallest."""
    for length, head_dim in product((2048, 8192, 512, 4096, 1024, 16384), (128, 64)):
        heads = 4096 // head_dim
        batch = max(1, 16384 // length // 2)
        yield attention("bfloat16", batch, heads, heads, length, head_dim, causal=True)
    for length in (2048, 8192, 512, 4096, 16384):
        batch = max(1, 8192 // length)
        yield attention("bfloat16", batch, 32, 8, length, 128, causal=True)
        yield attention("bfloat16", batch, 16, 16, length, 64, causal=False)
        yield attention("bfloat16", batch, 32, 32, length, 128, causal=False)
    for heads, length in ((8, 2048), (4, 4096), (16, 1024), (1, 8192)):
        yield attention("bfloat16", 1, heads, heads, length, 128, causal=True)
    yield attention("float16", 4, 32, 32, 2048, 128, causal=True)
    yield attention("float32", 1, 16, 16, 2048, 64, causal=True)
    yield attention("bfloat16", 4, 25, 25, 1000, 64, causal=True)
    yield attention("bfloat16", 4, 32, 32, 2048, 80, causal=True)


def _rowwise() -> Iterator[KernelCase]:
    """Norms, activations, adds and dropout from the size of an L2 to many times it."""
    for dtype, tokens, hidden in (
        *(("bfloat16", 8192, 4096), ("bfloat16", 2048, 1024), ("bfloat16", 16384, 8192)),
        *(("bfloat16", 4096, 2048), ("bfloat16", 1024, 768), ("bfloat16", 8192, 5120)),
        *(("float32", 8192, 4096), ("bfloat16", 32768, 1600), ("float16", 8192, 4096)),
    ):
        yield layer_norm(dtype, tokens, hidden)
        yield rms_norm(dtype, tokens, hidden)
        yield gelu(dtype, tokens, 4 * hidden)
        yield silu_mul(dtype, tokens, 7 * hidden // 2)
        yield add(dtype, tokens, hidden)
        yield dropout(dtype, tokens, hidden)


def _tables() -> Iterator[KernelCase]:
    """What reads or writes vocabulary-sized tensors, and the optimiser."""
    for vocab, tokens in ((128256, 4096), (32000, 8192), (50257, 8192), (256000, 2048)):
        yield cross_entropy(tokens, vocab)
        yield embedding("bfloat16", tokens, vocab, 4096)
        yield embedding("bfloat16", tokens, vocab, 1024)
    for elements in (2**28, 2**24, 2**20, 2**26, 2**22):
        yield adamw(elements)


# -- cases ----------------------------------------------------------------------------------------


def _random(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)


def linear(dtype: str, tokens: int, wide: int, deep: int, *, bias: bool = False) -> KernelCase:
    """A projection of (tokens, deep) to (tokens, wide): one product forward, two backward."""

    def build(device: torch.device, kind: torch.dtype) -> Built:
        x = _random(tokens, deep, device=device, dtype=kind)
        weight = _random(wide, deep, device=device, dtype=kind)
        offset = _random(wide, device=device, dtype=kind) if bias else None
        leaves = (x, weight) if offset is None else (x, weight, offset)
        return lambda: F.linear(x, weight, offset), leaves

    return KernelCase(group="matmul", dtype=dtype, build=build)


def scores(dtype: str, batch: int, length: int, head_dim: int) -> KernelCase:
    """Query times key for each of batch times heads."""

    def build(device: torch.device, kind: torch.dtype) -> Built:
        query, key = (_random(batch, length, head_dim, device=device, dtype=kind) for _ in "qk")
        return lambda: torch.bmm(query, key.transpose(1, 2)), (query, key)

    return KernelCase(group="batched matmul", dtype=dtype, build=build)


def context(dtype: str, batch: int, length: int, head_dim: int) -> KernelCase:
    """Weights times value for each of batch times heads."""

    def build(device: torch.device, kind: torch.dtype) -> Built:
        weights = _random(batch, length, length, device=device, dtype=kind)
        value = _random(batch, length, head_dim, device=device, dtype=kind)
        return lambda: torch.bmm(weights, value), (weights, value)

    return KernelCase(group="batched matmul", dtype=dtype, build=build)


def attention(  # noqa: PLR0913  # all that a kernel of attention depends on
    dtype: str,
    batch: int,
    heads: int,
    kv_heads: int,
    length: int,
    head_dim: int,
    *,
    causal: bool,
) -> KernelCase:
    """Fused attention; with fewer key heads they are shared by groups of queries."""

    def build(device: torch.device, kind: torch.dtype) -> Built:
        # Heads lie beside each other in memory, as projections leave them.
        query, key, value = (
            _random(batch, length, count, head_dim, device=device, dtype=kind)
            for count in (heads, kv_heads, kv_heads)
        )

        def forward() -> Tensor:
            return F.scaled_dot_product_attention(
                query.transpose(1, 2),
                key.transpose(1, 2),
                value.transpose(1, 2),
                is_causal=causal,
                enable_gqa=kv_heads != heads,
            )

        return forward, (query, key, value)

    return KernelCase(group="attention", dtype=dtype, build=build, causal=causal)


def layer_norm(dtype: str, tokens: int, hidden: int) -> KernelCase:
    """LayerNorm with weight and bias."""

    def build(device: torch.device, kind: torch.dtype) -> Built:
        x = _random(tokens, hidden, device=device, dtype=kind)
        weight, bias = (_random(hidden, device=device, dtype=kind) for _ in "wb")
        return lambda: F.layer_norm(x, (hidden,), weight, bias), (x, weight, bias)

    return KernelCase(group="layer_norm", dtype=dtype, build=build)


def rms_norm(dtype: str, tokens: int, hidden: int) -> KernelCase:
    """RMSNorm with a weight."""

    def build(device: torch.device, kind: torch.dtype) -> Built:
        x = _random(tokens, hidden, device=device, dtype=kind)
        weight = _random(hidden, device=device, dtype=kind)
        return lambda: F.rms_norm(x, (hidden,), weight, 1e-5), (x, weight)

    return KernelCase(
        group="rms_norm", dtype=dtype, build=build,
        whole=("_fused_rms_norm", "_fused_rms_norm_backward"),
    )  # fmt: skip


def gelu(dtype: str, tokens: int, wide: int) -> KernelCase:
    """GELU."""

    def build(device: torch.device, kind: torch.dtype) -> Built:
        x = _random(tokens, wide, device=device, dtype=kind)
        return lambda: F.gelu(x), (x,)

    return KernelCase(group="gelu", dtype=dtype, build=build)


def silu_mul(dtype: str, tokens: int, wide: int) -> KernelCase:
    """The gate of SwiGLU: two kernels forward, three backward."""

    def build(device: torch.device, kind: torch.dtype) -> Built:
        gate, x = (_random(tokens, wide, device=device, dtype=kind) for _ in "gx")
        return lambda: F.silu(gate) * x, (gate, x)

    return KernelCase(group="silu and mul", dtype=dtype, build=build)


def add(dtype: str, tokens: int, hidden: int) -> KernelCase:
    """Residual add; its backward runs no kernel."""

    def build(device: torch.device, kind: torch.dtype) -> Built:
        x, y = (_random(tokens, hidden, device=device, dtype=kind) for _ in "xy")
        return lambda: x + y, (x, y)

    return KernelCase(group="residual add", dtype=dtype, build=build)


def dropout(dtype: str, tokens: int, hidden: int) -> KernelCase:
    """Dropout of a tenth."""

    def build(device: torch.device, kind: torch.dtype) -> Built:
        x = _random(tokens, hidden, device=device, dtype=kind)
        return lambda: F.dropout(x, 0.1), (x,)

    return KernelCase(group="dropout", dtype=dtype, build=build)


def embedding(dtype: str, tokens: int, vocab: int, hidden: int) -> KernelCase:
    """Row gather, and the scatter of its backward."""

    def build(device: torch.device, kind: torch.dtype) -> Built:
        table = _random(vocab, hidden, device=device, dtype=kind)
        indices = torch.randint(0, vocab, (tokens,), device=device)
        return lambda: F.embedding(indices, table), (table,)

    return KernelCase(group="embedding", dtype=dtype, build=build)


def cross_entropy(tokens: int, vocab: int) -> KernelCase:
    """The loss of a language model; logits in float32, as training scripts hand them over."""

    def build(device: torch.device, kind: torch.dtype) -> Built:
        logits = _random(tokens, vocab, device=device, dtype=kind)
        targets = torch.randint(0, vocab, (tokens,), device=device)
        return lambda: F.cross_entropy(logits, targets), (logits,)

    return KernelCase(group="cross entropy", dtype="float32", build=build)


def adamw(elements: int) -> KernelCase:
    """The fused AdamW step on float32 parameters, 16 of them."""

    def build(device: torch.device, kind: torch.dtype) -> Built:
        parameters = [
            _random(elements // 16, device=device, dtype=kind).requires_grad_() for _ in range(16)
        ]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = torch.optim.AdamW(parameters, weight_decay=0.1, fused=True)
        optimizer.step()  # makes the state
        return lambda: optimizer.step(), ()

    return KernelCase(group="adamw", dtype="float32", build=build)
