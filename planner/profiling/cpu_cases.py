"""The ops that are timed on a CPU: sizes from a core's cache to memory.

A CPU's rates differ more between ops than those of a GPU (a GELU computes, a copy does not), and
depend on the cache that the operands fit into. So each op has a curve of its own.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from planner.profiling.kernel_cases import (
    add,
    attention,
    cross_entropy,
    dropout,
    embedding,
    gelu,
    layer_norm,
    linear,
    rms_norm,
    scores,
    silu_mul,
)
from planner.profiling.kernels import Built, KernelCase

QUICK_ELEMENTS = (2**12, 2**17, 2**20)
"""Of a tensor: 16 KiB, 512 KiB, 4 MiB."""

ELEMENTS = (2**12, 2**15, 2**17, 2**19, 2**21, 2**23)

WIDTH = 256
"""Of the rows of norms and the like."""


def cpu_cases(*, quick: bool) -> Iterator[KernelCase]:
    """List them, the most telling first."""
    yield from _products(quick=quick)
    for elements in QUICK_ELEMENTS if quick else ELEMENTS:
        yield from _rowwise(elements // WIDTH, WIDTH)
    for tokens, vocab in (
        ((512, 128), (256, 4096)) if quick else ((512, 128), (256, 4096), (512, 32000))
    ):
        yield cross_entropy(tokens, vocab)
        yield embedding("float32", tokens, vocab, WIDTH)
    yield from _pictures(quick=quick)
    for dtype in ("bfloat16", "float64"):
        yield product(dtype, 256)


def product(dtype: str, side: int) -> KernelCase:
    """One square product: for the rate of a dtype that is not timed any further."""

    def build(device: torch.device, kind: torch.dtype) -> Built:
        left, right = (torch.randn(side, side, device=device, dtype=kind) for _ in "lr")

        def forward() -> None:
            torch.mm(left, right)

        return forward, ()

    return KernelCase(group="matmul", dtype=dtype, build=build)


def _products(*, quick: bool) -> Iterator[KernelCase]:
    shapes = ((512, 512, 512), (512, 64, 64), (64, 256, 256), (512, 256, 64), (16, 512, 512))
    more = ((2048, 1024, 1024), (512, 64, 256), (128, 2048, 512), (4096, 128, 128), (33, 65, 129))
    for tokens, wide, deep in shapes if quick else (*shapes, *more):
        yield linear("float32", tokens, wide, deep)
    attentions = ((8, 64, 8), (8, 64, 16), (4, 128, 32), (2, 256, 64))
    more_attentions = ((4, 128, 8), (2, 256, 16), (1, 512, 64), (1, 256, 128))
    for batch, length, head_dim in attentions if quick else (*attentions, *more_attentions):
        yield attention("float32", batch, 8, 8, length, head_dim, causal=True)
        yield attention("float32", batch, 8, 8, length, head_dim, causal=False)
    yield scores("float32", 32, 64, 16)


def _rowwise(rows: int, width: int) -> Iterator[KernelCase]:
    yield layer_norm("float32", rows, width)
    yield rms_norm("float32", rows, width)
    for case in (gelu, silu_mul, add, dropout):
        yield case("float32", rows, width)
    yield _unary("relu", F.relu, rows, width)
    yield _unary("tanh", torch.tanh, rows, width)
    yield _unary("softmax", lambda x: torch.softmax(x, -1), rows, width)
    yield _unary("copy", lambda x: x.t().clone(memory_format=torch.contiguous_format), rows, width)
    yield _unary("sum", lambda x: x.sum(0), rows, width)
    yield _unary(
        "halves", lambda x: torch.cat((x[:, : width // 2], x[:, width // 2 :]), 0), rows, width
    )
    side = max(1, int((rows * width / 32) ** 0.5))
    yield _picture("batch_norm", lambda x: F.batch_norm(x, None, None, training=True), side)
    yield _picture("group_norm", lambda x: F.group_norm(x, 8), side)


def _pictures(*, quick: bool) -> Iterator[KernelCase]:
    shapes = ((4, 32, 32, 16, 3), (2, 64, 64, 16, 3), (4, 3, 32, 32, 3), (2, 64, 32, 16, 1))
    more = ((4, 16, 32, 32, 3), (1, 128, 128, 16, 3), (4, 3, 128, 64, 8))
    for batch, channels, outputs, side, kernel in shapes if quick else (*shapes, *more):
        yield convolution(batch, channels, outputs, side, kernel)
    for side in (16, 64):
        yield _picture("max_pool", lambda x: F.max_pool2d(x, 2), side)
        yield _picture("upsample", lambda x: F.interpolate(x, scale_factor=2.0), side)


def _unary(group: str, function: Callable[[Tensor], Tensor], rows: int, width: int) -> KernelCase:
    def build(device: torch.device, kind: torch.dtype) -> Built:
        x = torch.randn(rows, width, device=device, dtype=kind, requires_grad=True)
        return lambda: function(x), (x,)

    return KernelCase(group=group, dtype="float32", build=build)


def _picture(group: str, function: Callable[[Tensor], Tensor], side: int) -> KernelCase:
    def build(device: torch.device, kind: torch.dtype) -> Built:
        x = torch.randn(2, 16, side, side, device=device, dtype=kind, requires_grad=True)
        return lambda: function(x), (x,)

    return KernelCase(group=group, dtype="float32", build=build)


def convolution(batch: int, channels: int, outputs: int, side: int, kernel: int) -> KernelCase:
    """A convolution that keeps the size of pictures, or cuts them into patches (large kernels)."""

    def build(device: torch.device, kind: torch.dtype) -> Built:
        x = torch.randn(batch, channels, side, side, device=device, dtype=kind, requires_grad=True)
        weight = torch.randn(
            outputs, channels, kernel, kernel, device=device, dtype=kind, requires_grad=True
        )
        patches = kernel > 3
        stride, padding = (kernel, 0) if patches else (1, kernel // 2)
        return lambda: F.conv2d(x, weight, stride=stride, padding=padding), (x, weight)

    return KernelCase(group="convolution", dtype="float32", build=build)
