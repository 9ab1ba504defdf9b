"""What the script's own code takes of the host: of a step, a block, a parameter, a message."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from planner.profiling.clock import Clock, Spread
from planner.profiling.host_model import WIDTH, Block, loss_fn, scaled, transformer
from planner.profiling.kernels import Capture, KernelRow, described
from planner.runtime.model import UserModel
from planner.runtime.parallel_model import ParallelModel
from planner.runtime.part import Part, shard_parameters
from planner.vocabulary import Axis

TOKENS = 8
STEPS = 4
"""Of a pipeline."""
ROUNDS = 7
"""Steps of each run of the script, one of each in turn."""

SHAPES: tuple[dict[str, Any], ...] = (
    {"blocks": 2, "tensors": 2, "microbatches": 1, "reshards": False},
    {"blocks": 8, "tensors": 2, "microbatches": 1, "reshards": False},
    {"blocks": 2, "tensors": 50, "microbatches": 1, "reshards": False},
    {"blocks": 8, "tensors": 2, "microbatches": 3, "reshards": False},
    {"blocks": 4, "tensors": 2, "microbatches": 3, "reshards": True},
    {"blocks": 2, "tensors": 50, "microbatches": 1, "reshards": False, "shares": False},
)
"""Runs of the script that differ in one thing each, by far more than a machine's speed drifts."""


def _batch() -> Tensor:
    return torch.randn(1, TOKENS, WIDTH)


def op_overhead(clock: Clock) -> dict[str, Any]:
    """Time forward and backward of small blocks, and list the ops that they run."""
    model, x = transformer(2).to(clock.device), _batch().to(clock.device)

    def step() -> None:
        torch.autograd.backward(loss_fn(model(x), x))

    with Capture() as captured:
        step()
    spread = clock.time_call(step, limit_s=0.05)
    return {"calls": [described(call) for call in captured.calls], "spread": spread}


def script_step(
    blocks: int,
    tensors: int,
    microbatches: int,
    *,
    reshards: bool,
    device: torch.device,
    shares: bool = True,
) -> Callable[[], object]:
    """Make a step of the script over all ranks.

    Ranks share the state, as in sharded data-parallel training, or each has all of one, as stages
    of a pipeline.
    """
    world = dist.get_world_size()
    sizes = (1, world) if shares else (world, 1)
    ranks = init_device_mesh(device.type, sizes, mesh_dim_names=(Axis.PP, Axis.DP_SHARD))
    mesh = ranks[Axis.DP_SHARD]
    user = UserModel(factory="scaled", functions={"loss_fn": loss_fn}, module=__name__)
    part = Part(scaled(blocks, tensors), user, blocks=[str(index) for index in range(blocks)])
    part.move_to(device, torch.float32)
    shard_parameters(part, mesh, torch.float32, reshard_after_forward=reshards)
    part.materialise()
    model = ParallelModel(
        user=user,
        parts=[part],
        num_microbatches=microbatches,
        microbatch_size=1,
        seed=0,
        max_grad_norm=1.0,
        configure_optimizer=_fused_adamw,
        data_parallel=mesh,
    )
    x = _batch().repeat(microbatches, 1, 1)
    return lambda: model.step((x, x))


def _fused_adamw(named: Iterator[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named], fused=True)


def time_scripts(device: torch.device) -> list[Spread]:
    """Time steps of each shape by what the rank's own thread runs, not what it waits for.

    They take turns. A machine whose speed drifts between one run and the next would else show its
    drift where the terms are told apart by the differences of runs.
    """
    return own_times([script_step(**shape, device=device) for shape in SHAPES], ROUNDS)


def own_times(steps: Sequence[Callable[[], object]], rounds: int) -> list[Spread]:
    """Time steps that take turns, by what the rank's own thread runs."""
    for step in steps:
        step()
    seconds: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for step, found in zip(steps, seconds, strict=True):
            start_s = time.thread_time()
            step()
            found.append(time.thread_time() - start_s)
    return [Spread.of(found) for found in seconds]


def time_pipeline(
    num_microbatches: int, group: dist.ProcessGroup, members: list[int], device: torch.device
) -> Spread:
    """Time steps of a pipeline of these ranks, a block each, by what a rank's own thread runs."""
    place, stages = members.index(dist.get_rank()), len(members)
    batch = _batch().to(device)
    example = batch.clone().requires_grad_()
    stage = PipelineStage(
        Block().to(device), place, stages, device, input_args=(example,), output_args=(example,),
        group=group,
    )  # fmt: skip
    schedule = Schedule1F1B(stage, num_microbatches, loss_fn=loss_fn)
    whole = batch.repeat(num_microbatches, 1, 1)

    def step() -> None:
        ends: dict[str, Any] = {"target": whole, "losses": []} if place == stages - 1 else {}
        schedule.step(*((whole,) if place == 0 else ()), **ends)

    (spread,) = own_times([step], STEPS)
    return spread


def block_ops() -> list[KernelRow]:
    """The ops of one microbatch of a block."""
    block, x = Block(), _batch()
    with Capture() as captured:
        torch.autograd.backward(loss_fn(block(x), x))
    return [described(call) for call in captured.calls]


def scaled_ops(shape: dict[str, Any]) -> list[KernelRow]:
    """The ops of one microbatch of such a model."""
    model, x = scaled(shape["blocks"], shape["tensors"]), _batch()
    with Capture() as captured:
        torch.autograd.backward(loss_fn(model(x), x))
    return [described(call) for call in captured.calls]


def update_step(elements: int, device: torch.device) -> Callable[[], object]:
    """Clipping and AdamW on one tensor, as the script does them on its shards."""
    parameter = nn.Parameter(torch.randn(elements, device=device))
    parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)

    def step() -> None:
        nn.utils.clip_grad_norm_([parameter], 1.0)
        optimizer.step()

    return step
