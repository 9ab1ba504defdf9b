"""The price of one optimiser step: the one that plans, estimates and validation show."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.cost.breakdown import CostBreakdown, MemoryBreakdown
from planner.cost.held_stage import HeldStage
from planner.cost.kinds import CostsOfKinds
from planner.cost.model_units import ModelUnits
from planner.cost.node_pricing import RankSpec
from planner.cost.shared_cores import times_of
from planner.cost.stage_costs import StageCosts
from planner.cost.stage_cuts import leaves_ranks_empty, stage_bounds
from planner.cost.stage_seconds import StageSeconds
from planner.framework.spec import FrameworkSpec
from planner.hardware.spec import ClusterSpec
from planner.strategy.configuration import Configuration
from planner.strategy.mesh import BESIDE
from planner.strategy.moments import RankMoment, StageMoment
from planner.strategy.placement import axis_group
from planner.vocabulary import Axis, Recomputation


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChoice:
    """What a stage holds."""

    first: int
    """First unit."""
    end: int
    """One past the last unit."""
    kinds: tuple[str, ...]
    """Recomputation of each unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrice:
    """What a step costs."""

    costs: CostBreakdown
    """Where its time goes; the parts add up to that of the schedule's action list."""
    stages: tuple[StageSeconds, ...]
    """Seconds of each stage in model order."""
    moments: tuple[tuple[RankMoment, ...], ...]
    """Fullest moments of each rank."""
    memory_by_rank: tuple[MemoryBreakdown, ...]
    """Each pipeline rank at its fullest moment."""
    fits: bool
    """Whether the fullest rank fits into its device, and every rank has a part of the model."""

    @property
    def peak_memory(self) -> MemoryBreakdown:
        """That of the fullest rank."""
        return max(self.memory_by_rank, key=lambda memory: memory.total_bytes)


def price_step(costs: StageCosts | CostsOfKinds, stages: Sequence[StageChoice]) -> StepPrice:
    """Price a step.

    Args:
        costs: Prices of the configuration's stages.
        stages: What each stage holds, in model order.
    """
    configuration = costs.configuration
    pp = configuration.degrees.pp
    seconds = tuple(
        costs.of_stage(index).seconds(choice.first, choice.end, choice.kinds, stage=index)
        for index, choice in enumerate(stages)
    )
    times = times_of(
        configuration,
        forward_s=[each.forward_s for each in seconds],
        backward_s=[each.backward_s for each in seconds],
        weight_backward_s=[each.weight_backward_s for each in seconds],
    )
    moments = tuple(
        configuration.fullest_moments(rank)
        if times.in_flight is None
        else ((StageMoment(in_flight=times.in_flight[rank]),),)
        for rank in range(pp)
    )
    of_rank = [costs.of_stage(configuration.stages_of(rank)[0]) for rank in range(pp)]
    held = [[stages[index] for index in configuration.stages_of(rank)] for rank in range(pp)]
    memories = tuple(map(_fullest, of_rank, held, moments))
    return StepPrice(
        costs=_breakdown(configuration, seconds, times.step_s),
        stages=seconds,
        moments=moments,
        memory_by_rank=memories,
        fits=all(map(_holds, of_rank, held, memories)),
    )


def _holds(costs: StageCosts, stages: Sequence[StageChoice], memory: MemoryBreakdown) -> bool:
    """Whether a device and its host hold what a rank does."""
    on_host = max(costs.memory.host_bytes(each.first, each.end, each.kinds) for each in stages)
    most = costs.device.capacity_bytes - costs.framework.unusable_bytes
    return memory.total_bytes <= most and not costs.state.lacks(on_host)


def _fullest(
    costs: StageCosts, stages: Sequence[StageChoice], moments: Sequence[RankMoment]
) -> MemoryBreakdown:
    """A rank at the fullest of the moments of its schedule."""
    return costs.memory.peak(
        *(
            [
                HeldStage(first=each.first, end=each.end, kinds=each.kinds, moment=at)
                for each, at in zip(stages, moment, strict=True)
            ]
            for moment in moments
        )
    )


def _breakdown(
    configuration: Configuration, seconds: Sequence[StageSeconds], pipeline_s: float
) -> CostBreakdown:
    """Split a step by cause, as the slowest rank sees it; as all do on the mean that share cores.

    A slow one of these has the cores of the others while they wait for it.
    """
    pp, m = configuration.degrees.pp, configuration.num_microbatches
    ranks = [[seconds[index] for index in configuration.stages_of(rank)] for rank in range(pp)]
    last = max(ranks, key=lambda held: sum(time.step_s for time in held))
    if configuration.shares_cores:
        slowest, passes = list(seconds), m / pp
    else:
        slowest, passes = max(ranks, key=lambda held: sum(time.microbatch_s for time in held)), m
    busy_s = passes * sum(time.microbatch_s for time in slowest)
    split_s = passes * sum(time.tp_comm_s for time in slowest)
    by_axis = {
        Axis.CP: passes * sum(time.context_comm_s for time in slowest),
        Axis.EP: passes * sum(time.expert_comm_s for time in slowest),
    }
    axis = configuration.degrees.split_axis
    rest_s = split_s - sum(by_axis.values())
    by_axis[axis] = by_axis.get(axis, 0.0) + rest_s
    return CostBreakdown(
        compute_s=passes * sum(time.compute_s for time in slowest),
        recompute_s=passes * sum(time.recompute_s for time in slowest),
        tp_comm_s=by_axis.get(Axis.TP, 0.0),
        cp_comm_s=by_axis.get(Axis.CP, 0.0),
        ep_comm_s=by_axis.get(Axis.EP, 0.0),
        pp_comm_s=passes * sum(time.pp_comm_s for time in slowest),
        dp_comm_s=passes * sum(time.dp_comm_s for time in slowest)
        + sum(time.step_comm_s for time in last),
        bubble_s=max(0.0, pipeline_s - busy_s) if pp > 1 else 0.0,
        optimizer_s=sum(time.optimizer_s for time in last),
    )


def rank_spec(
    cluster: ClusterSpec, framework: FrameworkSpec, configuration: Configuration, dtype: str
) -> RankSpec:
    """What the price of a unit's work depends on under a configuration."""
    degrees = configuration.degrees
    order = configuration.mesh_order
    pipeline = axis_group(cluster, degrees, Axis.PP, order)
    by_rank = framework.issues_by_rank and pipeline.spans_nodes
    return RankSpec(
        device=cluster.device,
        dtype=dtype,
        tp_group=axis_group(cluster, degrees, degrees.split_axis, order),
        beside={axis: axis_group(cluster, degrees, axis, order) for axis in BESIDE},
        host=cluster.host,
        splits_ops=degrees.tp * degrees.cp > 1,
        compiled=configuration.compile,
        collective_host_s=framework.collective_host_s,
        network_host_s=framework.collective_host_s * degrees.tp * by_rank,
    )


def price_layout(
    model: ModelUnits,
    *,
    configuration: Configuration,
    recompute: str,
    cluster: ClusterSpec,
    framework: FrameworkSpec,
) -> StepPrice:
    """Price a layout whose stages are cut as its framework cuts them.

    Args:
        model: Units priced under ``rank_spec``.
        configuration: Degrees, schedule, microbatches, form of the state.
        recompute: Recomputation of all blocks, or Recomputation.EVERY_OTHER_LAYER.
        cluster: Devices and links.
        framework: What runs the step.
    """
    stages = framework_stages(
        model,
        framework,
        num_stages=configuration.num_stages,
        recompute=recompute,
    )
    price = price_step(StageCosts(model, configuration, cluster, framework), stages)
    starts = not leaves_ranks_empty(
        model.matmul_flop, configuration.num_stages, framework.stage_cuts
    )
    return replace(price, fits=price.fits and starts)


def framework_stages(
    model: ModelUnits, framework: FrameworkSpec, *, num_stages: int, recompute: str
) -> list[StageChoice]:
    """Cut a model as a framework does, all blocks recomputed alike.

    Args:
        model: Its units.
        framework: Its rule for cuts.
        num_stages: Stages in all, virtual ones counted.
        recompute: Recomputation of all blocks, or Recomputation.EVERY_OTHER_LAYER.
    """
    bounds = stage_bounds(
        model.matmul_flop,
        epilogue_units=model.epilogue_units,
        stages=num_stages,
        cuts=framework.stage_cuts,
    )
    kinds = _kinds(model, recompute)
    return [StageChoice(first=first, end=end, kinds=kinds[first:end]) for first, end in bounds]


def _kinds(model: ModelUnits, recompute: str) -> tuple[str, ...]:
    """Recomputation of every unit; only blocks are recomputed."""
    found: list[str] = [Recomputation.NONE] * len(model.units)
    for position, index in enumerate(model.blocks):
        if recompute != Recomputation.EVERY_OTHER_LAYER:
            found[index] = recompute
        elif position % 2 == 0:
            found[index] = Recomputation.FULL
    return tuple(found)
