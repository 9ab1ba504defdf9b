"""Times collectives and transfers of a process group, all groups of a kind at once.

Alone, and between work of the ranks: those that share cores do not reach a collective together, and
each waits for the last of them.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from planner.profiling.clock import Spread

STRETCHES = 5
_TURNS = 4
"""Calls of a stretch, where ranks work between them."""
_JOINING_BYTES = 2**17
"""Gathered between work: the parameters of a small layer."""
JOINED_S = 0.004
"""Work before a collective: that of a block of a small model."""
_SIDE = 256
"""Of the square matrices that are multiplied as work: a product takes far less than all of it."""
_PRODUCTS = 8
"""Products by which it is found how many are the work asked for."""
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "send_recv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Groups of equal size that divide all ranks."""

    num_ranks: int
    stride: int
    """Ranks between neighbours of a group."""

    def members(self, world: int) -> list[list[int]]:
        """The ranks of each."""
        span = self.num_ranks * self.stride
        return [
            list(range(first + offset, first + offset + span, self.stride))
            for first in range(0, world, span)
            for offset in range(self.stride)
        ]

    def num_nodes(self, per_node: int) -> int:
        """Nodes that each of them spans."""
        return -(-self.num_ranks * self.stride // per_node) if self.spans(per_node) else 1

    def spans(self, per_node: int) -> bool:
        """Whether they leave their node."""
        return self.num_ranks * self.stride > per_node


def groups_of(world: int, per_node: int, *, quick: bool) -> list[Groups]:
    """Groups inside a node, and across nodes."""
    most = min(2, per_node) if quick else per_node
    inside = {size for size in range(2, most + 1) if per_node % size == 0} | {per_node} - {1}
    found = [Groups(num_ranks=size, stride=1) for size in sorted(inside)]
    if world > per_node:
        nodes = world // per_node
        found.append(Groups(num_ranks=nodes, stride=per_node))
        if nodes > 2 and nodes % 2 == 0:
            found.append(Groups(num_ranks=2, stride=per_node))
        if per_node > 1:
            found.append(Groups(num_ranks=world, stride=1))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Between:
    """Calls between work of the ranks, by the clock of the slowest of them."""

    own_s: float
    """Thread time of the work before each call, mean of the ranks."""
    both_s: float
    """Work and call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A collective or transfer on all groups at once."""

    alone: Spread
    """Calls one after the other."""
    between: Between | None
    """Between work, where that tells more."""


class Work:
    """Some work of a rank's core."""

    def __init__(self, work_s: float) -> None:
        """Find how many products take so long."""
        self._left, self._right = torch.randn(_SIDE, _SIDE), torch.randn(_SIDE, _SIDE)
        self._products = _PRODUCTS
        self.run()
        self._products = max(1, round(work_s * _PRODUCTS / self.run()))

    def run(self) -> float:
        """Do it, and return its thread time."""
        start_s = time.thread_time()
        for _ in range(self._products):
            torch.mm(self._left, self._right)
        return time.thread_time() - start_s


def time_collective(
    kind: str,
    payload_bytes: int,
    group: dist.ProcessGroup,
    members: list[int],
    device: torch.device,
    *,
    limit_s: float,
) -> Timed:
    """Time one on all groups at once, by the slowest rank's clock.

    Ranks of a CPU come to a collective of a step from work, and share cores: each waits for those
    that had none. Stages of a pipeline do not wait for one another at every transfer.
    """
    call = _call(kind, payload_bytes, group, members, device)
    _timed(call, 1, device)
    once_s = _slowest(_timed(call, 1, device), device)
    calls = max(1, min(200, int(limit_s / STRETCHES / once_s)))
    alone = Spread.of([_slowest(_timed(call, calls, device), device) for _ in range(STRETCHES)])
    joins = device.type == "cpu" and kind != "send_recv"
    return Timed(alone=alone, between=_between(call, JOINED_S) if joins else None)


def time_work(work_s: float) -> Between:
    """Time all ranks, of CPUs, that work for about ``work_s`` before each of some small gathers."""
    group, members = dist.group.WORLD, list(range(dist.get_world_size()))
    assert group is not None
    gather = _call("all_gather", _JOINING_BYTES, group, members, torch.device("cpu"))
    return _between(gather, work_s)


def _between(call: Callable[[], object], work_s: float) -> Between:
    work = Work(work_s)
    own_s = 0.0

    def both() -> None:
        nonlocal own_s
        own_s += work.run()
        call()

    cpu = torch.device("cpu")
    walls = [_slowest(_timed(both, _TURNS, cpu), cpu) for _ in range(STRETCHES)]
    total = torch.tensor(own_s, dtype=torch.float64)
    dist.all_reduce(total)
    return Between(
        own_s=float(total) / dist.get_world_size() / _TURNS / STRETCHES,
        both_s=statistics.median(walls),
    )


def _timed(call: Callable[[], object], calls: int, device: torch.device) -> float:
    dist.barrier()
    start_s = time.perf_counter()
    for _ in range(calls):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start_s) / calls


def _slowest(seconds: float, device: torch.device) -> float:
    worst = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


def _call(
    kind: str,
    payload_bytes: int,
    group: dist.ProcessGroup,
    members: list[int],
    device: torch.device,
) -> Callable[[], object]:
    size = len(members)
    elements = max(size, payload_bytes // 4 // size * size)
    whole = torch.ones(elements, device=device)
    part = torch.ones(elements // size, device=device)
    if kind == "all_gather":
        return lambda: dist.all_gather_single(whole, part, group=group)
    if kind == "reduce_scatter":
        return lambda: dist.reduce_scatter_single(part, whole, group=group)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    return _exchange(whole, group, members)


def _exchange(
    sent: torch.Tensor, group: dist.ProcessGroup, members: list[int]
) -> Callable[[], object]:
    """Send to the next rank of the group and receive from the one before, as stages do."""
    received = torch.empty_like(sent)
    place = members.index(dist.get_rank())
    after, before = members[(place + 1) % len(members)], members[place - 1]

    def call() -> None:
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, after, group=group),
                dist.P2POp(dist.irecv, received, before, group=group),
            ]
        )
        for work in works:
            work.wait()

    return call
