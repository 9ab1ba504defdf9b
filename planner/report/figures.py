"""Figures that follow from a plan: rates, shares, headroom, and what one plan loses to another."""

from dataclasses import dataclass, fields

from planner.cost.breakdown import CostBreakdown
from planner.hardware.spec import ClusterSpec, MeasuredError
from planner.plan.devices import devices_of_ranks
from planner.plan.types import Plan, Rejection, SearchOutcome
from planner.vocabulary import MODEL_AXES, Axis


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFigures:
    """What a plan achieves on a cluster."""

    step_time_s: float
    """One optimiser step, by the cost model."""
    tokens_per_s_per_gpu: float
    """Tokens (samples) per second and device."""
    mfu: float | None
    """Model FLOPs per second over the peak of all devices in the compute dtype; None where the
    profile states no peak for the dtype."""
    peak_memory_bytes: int
    """Memory of the fullest rank."""
    peak_rank: int
    """Pipeline rank that needs it."""
    capacity_bytes: int
    """Memory of its device."""
    margin_bytes: int
    """What of it is kept free."""

    @property
    def headroom_bytes(self) -> int:
        """Memory that stays free on the fullest rank."""
        return self.capacity_bytes - self.peak_memory_bytes


def plan_figures(plan: Plan, cluster: ClusterSpec) -> PlanFigures:
    """Derive what a plan achieves on a cluster."""
    step_time_s = plan.costs.step_time_s
    peak_flop_per_s = cluster.peak_flop_per_s(plan.dtype)
    num_gpus, rank = plan.degrees.world_size, fullest_rank(plan, cluster)
    device = devices_of_ranks(plan, cluster)[rank]
    return PlanFigures(
        step_time_s=step_time_s,
        tokens_per_s_per_gpu=plan.tokens_per_step / step_time_s / num_gpus,
        mfu=plan.flop_per_step / (step_time_s * peak_flop_per_s) if peak_flop_per_s else None,
        peak_memory_bytes=plan.memory_by_rank[rank].total_bytes,
        peak_rank=rank,
        capacity_bytes=device.memory_bytes,
        margin_bytes=device.margin_bytes,
    )


def fullest_rank(plan: Plan, cluster: ClusterSpec) -> int:
    """The pipeline rank that fills most of its device."""
    devices = devices_of_ranks(plan, cluster)
    shares = [
        memory.total_bytes / device.memory_bytes
        for memory, device in zip(plan.memory_by_rank, devices, strict=True)
    ]
    return shares.index(max(shares))


def model_axes(plan: Plan) -> tuple[Axis, ...]:
    """Axes over which a plan divides the model."""
    return tuple(axis for axis in MODEL_AXES if getattr(plan.degrees, axis) > 1)


def measured_error(plan: Plan, cluster: ClusterSpec) -> MeasuredError | None:
    """Find the error of measured runs of a plan's kind.

    Runs of its kind used its axes on its device, no fewer and no more devices than others of them,
    their steps took as long, and their models' FLOPs are of the same kinds of ops. None of these
    runs was of compiled blocks, or in float8.
    """
    if plan.compile or plan.float8:
        return None
    axes, num_gpus = model_axes(plan), plan.degrees.world_size
    for error in cluster.step_time_errors:
        if (
            error.axes == axes
            and error.least_gpus <= num_gpus <= error.most_gpus
            and error.least_step_s <= plan.costs.step_time_s <= error.most_step_s
            and set(plan.model.work) <= set(error.work)
        ):
            return error
    return None


def safer_choice(outcome: SearchOutcome, cluster: ClusterSpec) -> Plan | None:
    """Find the plan that holds the least memory of those within the error of the fastest.

    The error is that of step times: measured on runs of the fastest plan's kind, or where none
    were on clusters left out of the fit. None where no other plan holds less by more than the
    memory that is kept free for what memory is known to, or nothing is known of the error.
    """
    best = outcome.best
    measured = measured_error(best, cluster)
    error = cluster.uncalibrated_error if measured is None else measured.error
    if error is None:
        return None
    most_s = (1 + error) * best.costs.step_time_s
    known = (best, *outcome.candidates, outcome.rule_of_thumb)
    near = [plan for plan in known if plan and plan.costs.step_time_s <= most_s]
    safest = min(near, key=lambda plan: plan.peak_memory_bytes)
    freed_bytes = best.peak_memory_bytes - safest.peak_memory_bytes
    margin_bytes = max(kind.device.margin_bytes for kind in cluster.kinds)
    return safest if freed_bytes > margin_bytes else None


def exposed_comm_s(costs: CostBreakdown) -> float:
    """Communication of one step that nothing hides."""
    return costs.tp_comm_s + costs.cp_comm_s + costs.ep_comm_s + costs.pp_comm_s + costs.dp_comm_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CostDifference:
    """How a component of the step time differs between two plans."""

    component: str
    """Field of ``CostBreakdown``."""
    difference_s: float
    """Seconds more than the plan that it is compared with."""


def cost_differences(plan: Plan, reference: Plan) -> tuple[CostDifference, ...]:
    """Compare the step times of two plans by component, the largest difference first."""
    differences = [
        CostDifference(
            component=field.name,
            difference_s=getattr(plan.costs, field.name) - getattr(reference.costs, field.name),
        )
        for field in fields(CostBreakdown)
    ]
    return tuple(sorted(differences, key=lambda item: -abs(item.difference_s)))


def distinct_layouts(outcome: SearchOutcome, top: int) -> tuple[Plan, ...]:
    """Choose the plans to show: the best, then the fastest of each other layout.

    Plans with the same degrees and schedule differ in details only (microbatch, recomputation);
    the fastest of them speaks for all.

    Args:
        outcome: What the search found.
        top: Most plans to return.
    """
    chosen = {(outcome.best.degrees, outcome.best.schedule): outcome.best}
    for plan in outcome.candidates:
        chosen.setdefault((plan.degrees, plan.schedule), plan)
    return tuple(chosen.values())[:top]


def rejections_by_rule(outcome: SearchOutcome) -> dict[str, tuple[Rejection, ...]]:
    """Group the refused layouts by rule, the rule that refused most first."""
    groups: dict[str, list[Rejection]] = {}
    for rejection in outcome.rejections:
        groups.setdefault(rejection.rule, []).append(rejection)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    return {rule: tuple(group) for rule, group in ordered}


def num_layouts(outcome: SearchOutcome) -> int:
    """Layouts that were considered: priced and refused ones."""
    return len(outcome.candidates) + len(outcome.rejections)
