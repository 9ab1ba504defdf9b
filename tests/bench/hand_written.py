"""Training loops as torch's tutorials write them, for one layout each, without the planner.

Each trains ``wide_llama`` in float32 with AdamW and clipping, and returns the seconds of its steps.
"""

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import wide_llama
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

BATCH = 8
MICROBATCHES = {"dp_shard": 1, "tp": 1, "pp": 4}

BLOCK_PLAN = {
    **dict.fromkeys(
        ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"),
        ColwiseParallel(),
    ),
    **dict.fromkeys(("attention.wo", "feed_forward.w2"), RowwiseParallel()),
}


def train(layout: str, steps: int) -> list[float]:
    """Train for some steps on two processes under "dp_shard", "tp" or "pp"."""
    torch.manual_seed(0)
    model = wide_llama.build_model()
    return {"dp_shard": train_sharded, "tp": train_split, "pp": train_staged}[layout](model, steps)


def train_sharded(model: nn.Module, steps: int) -> list[float]:
    for block in model.layers:
        fully_shard(block)
    fully_shard(model)

    def run() -> Tensor:
        inputs, targets = wide_llama.example_batch(BATCH // 2)
        loss = wide_llama.loss_fn(model(inputs), targets)
        loss.backward()
        return loss.detach()

    return timed_steps(list(model.parameters()), run, steps)


def train_split(model: nn.Module, steps: int) -> list[float]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    outer = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, outer)
    for block in model.layers:
        parallelize_module(block, mesh, BLOCK_PLAN)

    def run() -> Tensor:
        inputs, targets = wide_llama.example_batch(BATCH)
        with loss_parallel():
            loss = wide_llama.loss_fn(model(inputs), targets)
            loss.backward()
        return loss.detach().full_tensor()

    return timed_steps(list(model.parameters()), run, steps)


class Half(nn.Module):
    """The first or the second half of the model."""

    def __init__(self, model: nn.Module, index: int) -> None:
        super().__init__()
        layers = model.layers
        assert isinstance(layers, nn.ModuleList)
        middle = len(layers) // 2
        self.first = index == 0
        self.embed = model.tok_embeddings if self.first else None
        self.layers = layers[:middle] if self.first else layers[middle:]
        self.ends = None if self.first else nn.ModuleList([model.norm, model.output])
        tables = dict(model.named_buffers(recurse=False))
        self.register_buffer("cos", tables["cos"])
        self.register_buffer("sin", tables["sin"])

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for block in self.layers:
            x = block(x, self.cos, self.sin)
        for module in self.ends or ():
            x = module(x)
        return x


def train_staged(model: nn.Module, steps: int) -> list[float]:
    rank = dist.get_rank()
    part = Half(model, rank)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES["pp"], loss_fn=wide_llama.loss_fn)

    def run() -> Tensor:
        inputs, targets = wide_llama.example_batch(BATCH)
        if rank == 0:
            schedule.step(inputs)
            return torch.zeros(())
        losses: list[Tensor] = []
        schedule.step(target=targets, losses=losses)
        return torch.stack(losses).mean().detach()

    return timed_steps(list(part.parameters()), run, steps)


def clip(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Clip gradients to a norm of 1; torch's norm takes no plain tensors beside DTensors."""
    squares = torch.zeros(())
    for kind in (True, False):
        known = [p.grad for p in parameters if p.grad is not None]
        grads = [grad for grad in known if isinstance(grad, DTensor) is kind]
        if grads:
            norm = nn.utils.get_total_norm(grads)
            squares += (norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2
    for kind in (True, False):
        group = [p for p in parameters if isinstance(p.grad, DTensor) is kind]
        nn.utils.clip_grads_with_norm_(group, 1.0, squares.sqrt())
    return squares.sqrt()


def timed_steps(
    parameters: Sequence[nn.Parameter], run: Callable[[], Tensor], steps: int
) -> list[float]:
    """Run, clip, update, and read the loss and the norm, as a loop that logs them does."""
    kinds = [[p for p in parameters if isinstance(p, DTensor) is kind] for kind in (True, False)]
    groups = [{"params": kind} for kind in kinds if kind]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, weight_decay=0.1, fused=True)
    seconds = []
    for _ in range(steps):
        start_s = time.perf_counter()
        loss = run()
        dist.all_reduce(loss)
        norm = clip(parameters)
        optimizer.step()
        optimizer.zero_grad()
        _ = loss.item(), norm.item()
        seconds.append(time.perf_counter() - start_s)
    return seconds
