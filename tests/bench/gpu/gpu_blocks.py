"""Times whole transformer blocks, several in a row, and sizes what they keep.

The blocks are those of ``examples``, recomputed by the very function that training scripts call.
Parameters have the compute dtype and there is no optimiser, so that only blocks run.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from planner.profiling.clock import Clock, Moment, Spread, seconds_between

sys.path.append(str(Path(__file__).resolve().parents[3]))
sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "run"))

import gpt
import llama

RECOMPUTATIONS = ("none", "selective", "full")
LIMIT_S = 1.2
"""Repeats of one stack take about so long."""

WARM_UP_STEPS = 2
FFN_RATIO = 3.5
"""Of the Llama blocks, as in Llama 3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """One block, and the microbatch that goes through it."""

    model: str
    """"gpt" or "llama"."""
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    seq_len: int
    microbatch_size: int
    dtype: str
    num_blocks: int
    """Blocks in a row."""

    def whole_model(self) -> nn.Module:
        """Build the model of ``examples`` with these blocks and a small vocabulary."""
        if self.model == "gpt":
            return gpt.GPT(
                gpt.GPTConfig(
                    block_size=self.seq_len,
                    n_layer=self.num_blocks,
                    n_head=self.heads,
                    n_embd=self.hidden,
                )
            )
        return llama.Llama(
            llama.LlamaConfig(
                dim=self.hidden,
                n_layers=self.num_blocks,
                n_heads=self.heads,
                n_kv_heads=self.kv_heads,
                ffn_dim=self.ffn,
                max_seq_len=self.seq_len,
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRow(BlockShape):
    """A measured stack: a row of blocks.csv; seconds are those of one block."""

    recompute: str
    forward_s: float
    forward_s_p10: float
    forward_s_p90: float
    backward_s: float
    """Recomputation included."""
    backward_s_p10: float
    backward_s_p90: float
    peak_memory_bytes: int
    """Of the whole stack, over what rests between steps; each gradient of a parameter is freed
    as soon as it is there."""
    repeats: int


class _Head(torch.autograd.Function):
    """Stands for what follows the blocks: keeps nothing of the stream, makes its gradient."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor, gradient: Tensor) -> Tensor:
        """Take the stream."""
        ctx.save_for_backward(gradient)
        return stream.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Give the stream a gradient of its own, which can be freed."""
        (gradient,) = ctx.saved_tensors
        return gradient.clone(), None


class Stack:
    """Some blocks in a row on a device, run forward and backward."""

    def __init__(self, shape: BlockShape, device: torch.device) -> None:
        dtype = getattr(torch, shape.dtype)
        with torch.device(device):
            model = shape.whole_model()
        self.blocks: nn.ModuleList = (
            model.transformer["h"] if shape.model == "gpt" else model.layers
        )
        self.blocks.to(dtype)
        # Tables of positions keep their dtype, as in a training script.
        self.tables = () if shape.model == "gpt" else (model.cos, model.sin)
        size = (shape.microbatch_size, shape.seq_len, shape.hidden)
        self._source, self._gradient = (
            torch.randn(size, dtype=dtype, device=device) for _ in range(2)
        )
        self._plain = [block.forward for block in self.blocks]

    def recompute(self, kind: str) -> None:
        """Recompute all blocks as a training script does."""
        from planner.runtime.recompute import recompute_activations

        for block, forward in zip(self.blocks, self._plain, strict=True):
            block.forward = forward
        items = [(str(index), block) for index, block in enumerate(self.blocks)]
        kinds = (kind,) * len(self.blocks)
        recompute_activations(SimpleNamespace(block_items=lambda: items), kinds)

    def resting_tensors(self) -> list[Tensor]:
        """List what lives between steps."""
        return [*self.blocks.parameters(), *self.tables, self._source, self._gradient]

    def step(self, now: Callable[[], Moment]) -> tuple[Moment, Moment, Moment]:
        """Run forward and backward once.

        Args:
            now: Tells the moment.

        Returns:
            Start and end of forward, end of backward.
        """
        self.blocks.zero_grad(set_to_none=True)
        stream = self._source.clone().requires_grad_()
        start = now()
        for block in self.blocks:
            stream = block(stream, *self.tables)
        middle = now()
        end = _Head.apply(stream, self._gradient)
        del stream
        torch.autograd.backward(end)
        return start, middle, now()


def measure_stack(shape: BlockShape, clock: Clock) -> Iterator[BlockRow]:
    """Measure a stack under each kind of recomputation."""
    stack = Stack(shape, clock.device)
    for kind in RECOMPUTATIONS:
        stack.recompute(kind)
        for _ in range(WARM_UP_STEPS):
            once = stack.step(clock.now)
        clock.wait()
        repeats = clock.repeats_within(LIMIT_S, seconds_between(once[0], once[2]))
        steps = [stack.step(clock.now) for _ in range(repeats)]
        clock.wait()
        forward = Spread.of([seconds_between(s[0], s[1]) / shape.num_blocks for s in steps])
        backward = Spread.of([seconds_between(s[1], s[2]) / shape.num_blocks for s in steps])
        yield BlockRow(
            **asdict(shape),
            recompute=kind,
            forward_s=forward.median_s,
            forward_s_p10=forward.p10_s,
            forward_s_p90=forward.p90_s,
            backward_s=backward.median_s,
            backward_s_p10=backward.p10_s,
            backward_s_p90=backward.p90_s,
            peak_memory_bytes=peak_bytes(stack, clock),
            repeats=repeats,
        )


def peak_bytes(stack: Stack, clock: Clock) -> int:
    """Highest memory of a step over what rests between steps.

    On a GPU the allocator says it, on a CPU the live tensors are counted.
    """
    stack.blocks.zero_grad(set_to_none=True)
    hooks = [
        parameter.register_post_accumulate_grad_hook(_drop_gradient)
        for parameter in stack.blocks.parameters()
    ]
    try:
        if clock.device.type == "cuda":
            clock.wait()
            resting_bytes = torch.cuda.memory_allocated(clock.device)
            torch.cuda.reset_peak_memory_stats(clock.device)
            stack.step(clock.now)
            clock.wait()
            return torch.cuda.max_memory_allocated(clock.device) - resting_bytes
        from track_peak import LiveBytes

        with LiveBytes() as tracker:
            for tensor in stack.resting_tensors():
                tracker.see_tensor(tensor)
            resting_bytes = tracker.now
            stack.step(clock.now)
        return int(tracker.peak - resting_bytes)
    finally:
        for hook in hooks:
            hook.remove()


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def block_shapes(*, smoke: bool) -> Iterator[BlockShape]:
    """List the stacks, the most telling first."""
    if smoke:
        for model in ("gpt", "llama"):
            yield _shape(model, 64, 64, 2, head_dim=16, dtype="float32", num_blocks=3)
        return
    for hidden, seq_len, microbatch_size in (
        *((4096, 2048, 4), (2048, 2048, 8), (1024, 1024, 8), (8192, 4096, 1), (4096, 8192, 1)),
        *((2048, 4096, 2), (1024, 2048, 4), (4096, 1024, 1), (2048, 1024, 1), (1024, 1024, 1)),
        *((8192, 2048, 2), (4096, 4096, 2), (2048, 8192, 2), (8192, 1024, 1), (1024, 8192, 2)),
        *((2048, 1024, 8), (4096, 2048, 1), (1024, 4096, 1), (8192, 8192, 1), (4096, 1024, 8)),
    ):
        for model in ("gpt", "llama"):
            head_dim = 64 if hidden < 2048 else 128
            yield _shape(
                model, hidden, seq_len, microbatch_size,
                head_dim=head_dim, dtype="bfloat16", num_blocks=4,
            )  # fmt: skip


def _shape(
    model: str, hidden: int, seq_len: int, microbatch_size: int, *,
    head_dim: int, dtype: str, num_blocks: int,
) -> BlockShape:  # fmt: skip
    heads = hidden // head_dim
    is_gpt = model == "gpt"
    return BlockShape(
        model=model,
        hidden=hidden,
        heads=heads,
        kv_heads=heads if is_gpt else max(1, heads // 4),
        ffn=4 * hidden if is_gpt else int(FFN_RATIO * hidden),
        seq_len=seq_len,
        microbatch_size=microbatch_size,
        dtype=dtype,
        num_blocks=num_blocks,
    )
