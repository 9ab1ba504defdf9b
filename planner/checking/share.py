"""One rank's share of a plan on a device of this machine, beside what the plan says of it."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from planner.checking.workers import ONE_THREAD, Seen, Workers, grown_evenly, reads_of
from planner.codegen.emit import ALLOCATOR
from planner.cost.step import StepPrice
from planner.errors import RequestError
from planner.framework.script import SCRIPT, framework_on_cluster
from planner.hardware.spec import ClusterSpec, DeviceSpec
from planner.plan.saved_model import saved_graphs
from planner.plan.serialize import SavedPlan
from planner.plan.types import Plan
from planner.pricing.reprice import plan_works, price_plan
from planner.profiling.residue import ON_CPU
from planner.strategy.placement import mesh_axis
from planner.vocabulary import Axis

MORE_GROUPS = 4
"""Groups of microbatches by which the longer run of a share is longer than the shorter one: what
one more takes is told by their difference."""

_WORKER = "planner.checking.share_run"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareCheck:
    """A rank that has a device for itself and waits for no other: no link, no bubble."""

    pp_rank: int
    """Pipeline rank."""
    device: str
    """What it ran on."""
    predicted_busy_s: float
    """A step by the plan's cost model on links that take no time."""
    measured_busy_s: float
    """Median step."""
    predicted_peak_bytes: int
    """By the plan, without what is in reserve."""
    measured_peak_bytes: int | None
    """Most that torch had allocated; None on a CPU."""
    predicted_device_bytes: int
    """By the plan, with what is in reserve."""
    measured_device_bytes: int | None
    """What the device had in use after the last step: the context, and all that torch's allocator
    had taken; buffers of communication are not among it. None on a CPU."""

    @property
    def time_error(self) -> float:
        """How far the predicted time is off, relative to the measured one."""
        return self.predicted_busy_s / self.measured_busy_s - 1.0

    @property
    def memory_error(self) -> float:
        """How far the predicted peak is off, relative to the measured one; 0 where none was."""
        if self.measured_peak_bytes is None:
            return 0.0
        return self.predicted_peak_bytes / self.measured_peak_bytes - 1.0


def require_gpu() -> None:
    """Refuse to run a share where there is no GPU.

    Raises:
        RequestError: There is none.
    """
    if not torch.cuda.is_available():
        raise RequestError(
            "--gpu: torch sees no GPU on this machine",
            hint="Leave --gpu out: memory and collectives are checked without one. Where there is "
            "one, `python -c 'import torch; print(torch.version.cuda)'` says what torch is for.",
        )


def check_shares(
    saved: SavedPlan, folder: Path, numbers: Sequence[int], *, on_gpu: bool
) -> tuple[ShareCheck, ...]:
    """Run one rank of each pipeline rank by itself, one after the other.

    Args:
        saved: The plan.
        folder: Folder of its script.
        numbers: Microbatches from which all others follow, as ``checked_microbatches`` has them.
        on_gpu: Run on the first GPU, else on one core of the CPU.

    Raises:
        ModelError: The plan's model is gone.
        VerificationError: It has changed since the plan was made.
        CheckError: The script does not run, or a share does not fit on the device.
    """
    plan = saved.plan
    price = price_without_links(saved)
    stride = mesh_axis(plan.degrees, Axis.PP, plan.mesh_order).stride
    numbers = timed_microbatches(numbers, plan.num_microbatches)
    jobs = [(rank * stride, number) for rank in range(plan.degrees.pp) for number in numbers]
    workers = Workers(
        module=_WORKER,
        folder=folder,
        reads=reads_of(plan),
        environment=_on_gpu() if on_gpu else {**ON_CPU, **ONE_THREAD},
    )
    found = workers.one_by_one(jobs)
    shares = []
    for rank in range(plan.degrees.pp):
        seen = [found[rank * stride, each] for each in numbers]
        grown = {
            name: grown_evenly([each[name] for each in seen], numbers, plan.num_microbatches)
            for name in ("step_s", "allocated_bytes", "used_bytes")
            if name in seen[-1]
        }
        shares.append(share_check(plan, price, rank, {"device": seen[-1]["device"], **grown}))
    return tuple(shares)


def timed_microbatches(numbers: Sequence[int], number: int) -> tuple[int, ...]:
    """Numbers of microbatches to time: the plan's, or two that are further apart.

    Args:
        numbers: From ``checked_microbatches``.
        number: Microbatches of the plan.
    """
    if len(numbers) == 1:
        return (number,)
    more = numbers[0] + MORE_GROUPS * (numbers[1] - numbers[0])
    return (numbers[0], more) if numbers[0] + more < number else (number,)


def price_without_links(saved: SavedPlan) -> StepPrice:
    """Price a plan as if nothing that ranks send each other took time.

    Raises:
        ModelError: The plan's model is gone.
        VerificationError: It has changed since the plan was made.
    """
    request = saved.request
    framework, _ = framework_on_cluster(
        SCRIPT,
        request.cluster,
        gpus=request.gpus,
        gpus_per_node=request.gpus_per_node,
        calibration=request.calibration,
    )
    works = plan_works(saved.plan, saved_graphs(saved), saved.cluster, framework)
    return price_plan(saved.plan, works, _with_free_links(saved.cluster), framework)


def _with_free_links(cluster: ClusterSpec) -> ClusterSpec:
    free = [
        replace(link, bandwidth_bytes_per_s=math.inf, latency_s=0.0, base_latency_s=0.0)
        for link in cluster.links
    ]
    parts = tuple(map(_with_free_links, cluster.parts))
    device = _without_traffic(cluster.device)
    return replace(cluster, device=device, links=tuple(free), parts=parts)


def _without_traffic(device: DeviceSpec) -> DeviceSpec:
    """A device whose kernels run beside no collective."""
    efficiency, fraction = device.efficiency, device.beside_traffic_fraction
    freed = replace(
        efficiency,
        sustained_fraction=efficiency.sustained_fraction / fraction,
        float8_sustained_fraction=efficiency.float8_sustained_fraction / fraction,
        matmul_fraction=efficiency.matmul_fraction / fraction,
    )
    return replace(device, efficiency=freed, beside_traffic_fraction=1.0)


def _on_gpu() -> dict[str, str]:
    """The first of the GPUs that this process sees (the mesh of a script deals them out)."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    keeps = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ALLOCATOR)  # as scripts do
    return {"PYTORCH_ALLOC_CONF": keeps, **os.environ, "CUDA_VISIBLE_DEVICES": first}


def share_check(plan: Plan, price: StepPrice, rank: int, seen: Seen) -> ShareCheck:
    """Hold the plan to what was seen of one pipeline rank.

    Args:
        plan: The plan.
        price: From ``price_without_links``.
        rank: Pipeline rank.
        seen: What the worker says of all its microbatches.
    """
    stages = [price.stages[stage.index] for stage in plan.stages if stage.pp_rank == rank]
    microbatches_s = plan.num_microbatches * sum(stage.microbatch_s for stage in stages)
    planned = plan.memory_by_rank[rank]
    is_gpu = "allocated_bytes" in seen
    return ShareCheck(
        pp_rank=rank,
        device=seen["device"],
        predicted_busy_s=microbatches_s + sum(stage.step_s for stage in stages),
        measured_busy_s=seen["step_s"],
        predicted_peak_bytes=planned.tensor_bytes,
        measured_peak_bytes=round(seen["allocated_bytes"]) if is_gpu else None,
        predicted_device_bytes=planned.total_bytes,
        measured_device_bytes=round(seen["used_bytes"]) if is_gpu else None,
    )
