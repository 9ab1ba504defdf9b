"""Rules of a plan's prices: alone, on its cluster, and beside the other plans of its search.

Sums of floats that are made in another order differ by rounding: ``_ROUNDING``. What a solver
found differs by its own tolerance: ``_SOLVED``.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields

from planner.cost.breakdown import CostBreakdown, MemoryBreakdown
from planner.hardware.mixed import orders
from planner.hardware.spec import ClusterSpec
from planner.plan.devices import devices_of_ranks, kinds_of_ranks
from planner.plan.types import Plan, SearchOutcome, SolverReport
from planner.strategy.placement import ranks_per_core
from planner.units import format_bytes
from planner.vocabulary import Axis, Dtype, Recomputation

_ROUNDING = 1e-9
_SOLVED = 1e-6
_CLOSED_GAP = 1e-4
"""Gap that counts as none: the solver's tolerance of a row, times thousands of microbatches."""

STATUSES = ("optimal", "work limit", "time limit")
"""What a search may say of its proof."""


def _above(value: float, most: float, tolerance: float = _ROUNDING) -> bool:
    """Whether a value is above another by more than rounding."""
    return value > most + tolerance * max(abs(value), abs(most))


def _numbers(plan: Plan) -> Iterator[str]:
    """Every time, size and count is finite and at least 0, the step takes time."""
    named: list[tuple[str, CostBreakdown | MemoryBreakdown]] = [("costs", plan.costs)]
    named += [(f"memory of rank {i}", memory) for i, memory in enumerate(plan.memory_by_rank)]
    named += [(f"memory of stage {stage.index}", stage.memory) for stage in plan.stages]
    for where, parts in named:
        for field in fields(parts):
            value = getattr(parts, field.name)
            if not 0 <= value < math.inf:
                yield f"{field.name} in the {where} is {value}"
    for stage in plan.stages:
        if not (0 <= stage.forward_s < math.inf and 0 <= stage.backward_s < math.inf):
            yield (
                f"stage {stage.index} takes {stage.forward_s} s forward, {stage.backward_s} s "
                "backward"
            )
    if not plan.costs.step_time_s > 0:
        yield f"the step takes {plan.costs.step_time_s} s"
    if plan.tokens_per_step < plan.global_batch_size or plan.flop_per_step < 0:
        yield f"a step has {plan.tokens_per_step} tokens and {plan.flop_per_step} FLOPs"


def _idle_parts(plan: Plan) -> Iterator[str]:
    """What the layout does not do costs nothing."""
    degrees, costs = plan.degrees, plan.costs
    recomputes = any(
        set(stage.activation_checkpointing) != {Recomputation.NONE} for stage in plan.stages
    )
    for is_idle, reason, names in (
        (degrees.tp == 1, "tp is 1", ("tp_comm_s",)),
        (degrees.cp == 1, "cp is 1", ("cp_comm_s",)),
        (degrees.ep == 1, "ep is 1", ("ep_comm_s",)),
        (degrees.pp == 1, "pp is 1", ("pp_comm_s", "bubble_s")),
        (degrees.world_size == 1 and not plan.cpu_offload, "there is one device", ("dp_comm_s",)),
        (not recomputes, "nothing is recomputed", ("recompute_s",)),
    ):
        for name in names:
            if is_idle and getattr(costs, name) != 0:
                yield f"{reason}, but {name} is {getattr(costs, name)}"


def _rank_seconds(plan: Plan) -> list[float]:
    """Seconds that each pipeline rank computes and waits for links in a step."""
    busy_s = [0.0] * plan.degrees.pp
    for stage in plan.stages:
        busy_s[stage.pp_rank] += plan.num_microbatches * (stage.forward_s + stage.backward_s)
    return busy_s


def _rank_memories(plan: Plan) -> Iterator[str]:
    """One entry per pipeline rank, between the fullest of its stages and all of them.

    Every stage alone has the reserve, but what of it grows with tensors. Sums round to a byte for
    each stage and part.
    """
    pp = plan.degrees.pp
    if len(plan.memory_by_rank) != pp:
        yield f"{len(plan.memory_by_rank)} ranks have a memory, but pp is {pp}"
        return
    for rank, memory in enumerate(plan.memory_by_rank):
        alone = [stage.memory for stage in plan.stages if stage.pp_rank == rank]
        slack = len(alone) * len(fields(MemoryBreakdown)) if len(alone) > 1 else 0
        least = max(each.total_bytes for each in alone)
        most = sum(each.tensor_bytes for each in alone) + memory.reserve_bytes
        params = sum(each.params_bytes for each in alone)
        if not least - slack <= memory.total_bytes <= most + slack:
            yield (
                f"rank {rank} needs {memory.total_bytes} bytes, its fullest stage {least}, all "
                f"of its stages {most}"
            )
        if abs(memory.params_bytes - params) > slack:
            yield f"rank {rank} keeps {memory.params_bytes} bytes of parameters, not {params}"
        if any(each.reserve_bytes > memory.reserve_bytes + slack for each in alone):
            yield f"rank {rank} has a smaller reserve than its stages"


PRICE_RULES: Mapping[str, Callable[[Plan], Iterator[str]]] = {
    "numbers": _numbers,
    "idle parts": _idle_parts,
    "rank memories": _rank_memories,
}
"""Rules of a plan by itself."""


def _busy_s(plan: Plan, cluster: ClusterSpec) -> float:
    """Seconds that a rank is busy in a step: the slowest, or the mean where they share cores."""
    busy_s = _rank_seconds(plan)
    if ranks_per_core(cluster, plan.degrees, plan.mesh_order) > 1:
        return sum(busy_s) / len(busy_s)
    return max(busy_s)


def _busy_time(plan: Plan, cluster: ClusterSpec) -> Iterator[str]:
    """The parts of the step are those of its slowest rank, or the mean where they share cores.

    Its forwards and backwards hold all parts but the bubble, the optimiser, and the traffic of
    data parallelism that comes once a step.
    """
    costs = plan.costs
    busy_s = _busy_s(plan, cluster)
    split_s = costs.tp_comm_s + costs.cp_comm_s + costs.ep_comm_s
    least_s = costs.compute_s + costs.recompute_s + split_s + costs.pp_comm_s
    if _above(least_s, busy_s) or _above(busy_s, least_s + costs.dp_comm_s):
        yield (
            f"what sets the pace is busy for {busy_s:.6g} s, but the parts of the step make "
            f"{least_s:.6g} s, with data-parallel traffic {least_s + costs.dp_comm_s:.6g} s"
        )


def _bubble(plan: Plan, cluster: ClusterSpec) -> Iterator[str]:
    """The pipeline runs for one microbatch through all stages at least.

    No stage waits for the weights' part of another's backward. It runs for all microbatches one
    after the other at most.
    """
    most_at_once = min(plan.degrees.pp, ranks_per_core(cluster, plan.degrees, plan.mesh_order))
    whole_s = sum(stage.forward_s + stage.backward_s for stage in plan.stages)
    through_s = whole_s - sum(stage.weight_backward_s for stage in plan.stages)
    through_s /= most_at_once  # others of its node wait
    running_s = _busy_s(plan, cluster) + plan.costs.bubble_s
    most_s = plan.num_microbatches * whole_s
    if _above(through_s, running_s) or _above(running_s, most_s):
        yield (
            f"the pipeline runs for {running_s:.6g} s; one microbatch alone takes "
            f"{through_s:.6g} s, all of them one by one {most_s:.6g} s"
        )


def _devices(plan: Plan, cluster: ClusterSpec) -> Iterator[str]:
    """The degrees multiply to the number of devices."""
    if plan.degrees.world_size != cluster.num_gpus:
        yield (
            f"the degrees multiply to {plan.degrees.world_size}, but the cluster has "
            f"{cluster.num_gpus} devices"
        )


def _kinds(plan: Plan, cluster: ClusterSpec) -> Iterator[str]:
    """The order of the ranks names each kind of device, and each stage lies on one of them."""
    known = orders(cluster)
    if plan.device_order not in known:
        given = ", ".join(plan.device_order) or "nothing"
        works = "; ".join(", ".join(order) or "nothing" for order in known)
        yield f"device_order is {given}, but on {cluster.name} it can be {works}"
        return
    ranks = plan.degrees.world_size // plan.degrees.pp
    if cluster.parts and any(part.num_gpus % ranks for part in cluster.parts):
        yield f"a stage has {ranks} ranks, some of which lie on two kinds of device"
    if cluster.parts and plan.nested_axes[0] != Axis.PP:
        yield f"{plan.nested_axes[0]} lies around pp, so that stages lie on two kinds of device"
    if cluster.parts and plan.virtual_stages > 1:
        yield f"a rank has {plan.virtual_stages} stages, on a cluster of several kinds of device"


def _memory(plan: Plan, cluster: ClusterSpec) -> Iterator[str]:
    """Every rank fits into its device, and leaves free what it should."""
    devices = devices_of_ranks(plan, cluster)
    for rank, (memory, device) in enumerate(zip(plan.memory_by_rank, devices, strict=False)):
        if memory.total_bytes > device.capacity_bytes:
            yield (
                f"pipeline rank {rank} needs {format_bytes(memory.total_bytes)} "
                f"({memory.total_bytes} bytes) of {device.capacity_words} "
                f"({device.capacity_bytes} bytes)"
            )


def _host_memory(plan: Plan, cluster: ClusterSpec) -> Iterator[str]:
    """What every rank has in host memory fits into its share of it."""
    hosts = [kind.host for kind in kinds_of_ranks(plan, cluster)]
    if plan.host_bytes_by_rank and None in hosts:
        yield f"something is offloaded, but nothing is known of the hosts of {cluster.name}"
    for rank, (needed, host) in enumerate(zip(plan.host_bytes_by_rank, hosts, strict=False)):
        if host is not None and needed > host.memory_bytes:
            yield (
                f"pipeline rank {rank} needs {format_bytes(needed)} of "
                f"{format_bytes(host.memory_bytes)} of its host"
            )


def _reserve(plan: Plan, cluster: ClusterSpec) -> Iterator[str]:
    """All ranks and stages on devices of one kind have the same reserve.

    What the allocator holds of tensors is not counted.
    """
    devices = devices_of_ranks(plan, cluster)
    fixed: dict[str, list[float]] = {}
    on_ranks = [*enumerate(plan.memory_by_rank), *((s.pp_rank, s.memory) for s in plan.stages)]
    for rank, memory in on_ranks:
        if rank < len(devices):
            device = devices[rank]
            bytes_alone = memory.reserve_bytes - device.allocator_share * memory.tensor_bytes
            fixed.setdefault(device.name, []).append(bytes_alone)
    for name, each in fixed.items():
        if max(each) - min(each) > 1:
            yield (
                f"ranks and stages on {name} have reserves of {min(each):.0f} to "
                f"{max(each):.0f} bytes"
            )


def _mfu(plan: Plan, cluster: ClusterSpec) -> Iterator[str]:
    """No more FLOPs per second than the devices' peak."""
    if peak := cluster.peak_flop_per_s(plan.dtype, float8=plan.float8):
        mfu = plan.flop_per_step / (plan.costs.step_time_s * peak)
        if not mfu <= 1:
            yield f"the MFU is {mfu:.1%}"


def _float8(plan: Plan, cluster: ClusterSpec) -> Iterator[str]:
    """Products in float8 only where the device has them, beside bfloat16."""
    for kind in cluster.kinds:
        if plan.float8 and not kind.device.float8_flop_per_s:
            yield f"products are in float8, of which {kind.device.name} has none"
    if plan.float8 and plan.dtype != Dtype.BFLOAT16:
        yield f"products are in float8, all else in {plan.dtype}"


CLUSTER_RULES: Mapping[str, Callable[[Plan, ClusterSpec], Iterator[str]]] = {
    "busy time": _busy_time,
    "bubble": _bubble,
    "devices": _devices,
    "kinds of device": _kinds,
    "float8": _float8,
    "memory": _memory,
    "host memory": _host_memory,
    "reserve": _reserve,
    "MFU": _mfu,
}
"""Rules of a plan on its cluster."""


def _bound(solver: SolverReport, best: Plan) -> Iterator[str]:
    """The bound is a time, and at most the objective."""
    if not 0 <= solver.bound_s < math.inf or _above(solver.bound_s, solver.objective_s, _SOLVED):
        yield f"the bound is {solver.bound_s} s, the objective {solver.objective_s} s"


def _objective(solver: SolverReport, best: Plan) -> Iterator[str]:
    """The objective is the step time of the best plan."""
    if not math.isclose(solver.objective_s, best.costs.step_time_s, rel_tol=_SOLVED):
        yield (
            f"the objective is {solver.objective_s:.9g} s, but the best plan takes "
            f"{best.costs.step_time_s:.9g} s"
        )


def _status(solver: SolverReport, best: Plan) -> Iterator[str]:
    """A known status; an optimal plan leaves no gap."""
    if solver.status not in STATUSES:
        yield f"the status is {solver.status!r}, not one of {', '.join(STATUSES)}"
    if solver.status == "optimal" and solver.gap > _CLOSED_GAP:
        yield f"the plan is called optimal with a gap of {solver.gap:.2%}"


PROOF_RULES: Mapping[str, Callable[[SolverReport, Plan], Iterator[str]]] = {
    "bound": _bound,
    "objective": _objective,
    "status": _status,
}
"""Rules of what is proven of the best plan."""


def _fastest_first(outcome: SearchOutcome) -> Iterator[str]:
    """The best plan is the first candidate, and none is faster."""
    if outcome.candidates[:1] != (outcome.best,):
        yield "the first candidate is not the best plan"
    best_s = outcome.best.costs.step_time_s
    for place, plan in enumerate(outcome.candidates):
        if _above(best_s, plan.costs.step_time_s, _SOLVED):
            yield (
                f"candidate {place} takes {plan.costs.step_time_s:.9g} s, the best plan "
                f"{best_s:.9g} s"
            )


def _same_training(outcome: SearchOutcome) -> Iterator[str]:
    """All plans train the same model on the same samples."""
    thumb = () if outcome.rule_of_thumb is None else (outcome.rule_of_thumb,)
    best = outcome.best
    for plan in (*outcome.candidates, *thumb):
        for name in (
            "model", "global_batch_size", "dtype", "units", "tied_parameters", "tokens_per_step"
        ):  # fmt: skip
            if getattr(plan, name) != getattr(best, name):
                yield f"{name} differs between two plans of one search"


OUTCOME_RULES: Mapping[str, Callable[[SearchOutcome], Iterator[str]]] = {
    "fastest first": _fastest_first,
    "same training": _same_training,
}
"""Rules of the plans of one search."""


def _baseline(outcome: SearchOutcome) -> Iterator[str]:
    """The rule of thumb is a layout like others: the bound holds for it."""
    thumb, bound_s = outcome.rule_of_thumb, outcome.solver.bound_s
    if thumb is not None and _above(bound_s, thumb.costs.step_time_s, _SOLVED):
        yield (
            f"nothing takes less than {bound_s:.9g} s, but the rule of thumb takes "
            f"{thumb.costs.step_time_s:.9g} s"
        )


OPEN_RULES: Mapping[str, Callable[[SearchOutcome], Iterator[str]]] = {"baseline": _baseline}
"""Rules of a search for which the request fixed no value."""
