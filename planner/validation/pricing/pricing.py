"""The price of a case: a run's layout under the search's own cost model."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from planner.cost.breakdown import CostBreakdown, MemoryBreakdown
from planner.cost.node_pricing import Pricing
from planner.cost.replicated import ReplicatedLayout, ReplicatedStages
from planner.cost.stage_memory import HeldStage, ModelUnits
from planner.cost.stage_table import OPTIMIZER_PASSES, GradientTraffic, StageTable
from planner.framework.spec import FrameworkSpec
from planner.framework.tuning import Tuned, tune
from planner.hardware.profiles import load_cluster
from planner.hardware.spec import ClusterSpec, LinkSpec
from planner.hardware.topology import CommGroup, comm_group
from planner.search.decode import step_costs
from planner.strategy.configuration import Configuration
from planner.strategy.mesh import ParallelDegrees
from planner.units import DTYPE_BYTES
from planner.validation.pricing.cases import Case
from planner.validation.pricing.pipeline import pipeline_times
from planner.validation.pricing.stages import leaves_ranks_empty, stage_bounds
from planner.validation.pricing.workbook import WorkBook, WorkKey
from planner.validation.types import EVERY_OTHER_LAYER, Run

_MASTER_BYTES = DTYPE_BYTES["float32"]

Values = Mapping[str, float]
"""Constants by their keys in ``planner.framework.tuning.SETTINGS``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CasePrice:
    """What a run costs."""

    costs: CostBreakdown
    """Where the time of a step goes."""
    memory: MemoryBreakdown
    """What the rank holds whose memory the runs state: the fullest, or the first."""
    fits: bool
    """Whether the layout runs: the fullest rank fits into its device, and every rank has a
    part of the model."""


@lru_cache(maxsize=1024)
def _cluster(name: str, gpus: int) -> ClusterSpec:
    return load_cluster(name, gpus=gpus)


class CasePricer:
    """Prices cases; what one question has drawn or priced serves the next."""

    def __init__(self) -> None:
        self._book = WorkBook()
        self._values: Values = {}
        self._tuned: dict[tuple[str, str, int], Tuned] = {}
        self._units: dict[tuple[str, str, WorkKey, CommGroup, float], ModelUnits] = {}

    def price(self, case: Case, values: Values | None = None) -> CasePrice:
        """Price one case.

        Args:
            case: The run.
            values: Constants in place of the profile's; None for the profile's own.

        Raises:
            PlannerError: The run's ranks do not fill the cluster's nodes, or its model cannot
                be traced.
        """
        if values is None:
            values = case.framework.tuned.get(case.cluster, {})
        if values != self._values:
            self._values, self._tuned, self._units = dict(values), {}, {}
        framework, cluster = self._in_place(case)
        model = self._model(case, framework, cluster)
        price = _fsdp_price if framework.state_form == "fsdp" else _replicated_price
        return price(case, model, framework, cluster)

    def _in_place(self, case: Case) -> Tuned:
        """The case's framework and cluster with the constants put in their place."""
        key = (case.framework.name, case.cluster, case.run.num_gpus)
        if key not in self._tuned:
            cluster = _cluster(case.cluster, case.run.num_gpus)
            self._tuned[key] = tune(case.framework, cluster, self._values)
        return self._tuned[key]

    def _model(self, case: Case, framework: FrameworkSpec, cluster: ClusterSpec) -> ModelUnits:
        run = case.run
        key = WorkKey(
            shape=replace(case.shape, layers=0),
            dtype=case.dtype,
            kernels=case.framework.kernels,
            tp=run.tp,
            sequence_parallel=run.sequence_parallel and run.tp > 1,
            microbatch_size=run.microbatch_size,
        )
        group = comm_group(cluster, degree=run.tp, stride=1)
        pipeline = comm_group(cluster, degree=run.pp, stride=run.tp * run.dp)
        crosses = pipeline.outer is not None
        network_host_s = framework.network_host_s * run.tp * crosses
        place = (framework.name, case.cluster, key, group, network_host_s)
        if place not in self._units:
            pricing = Pricing(
                device=cluster.device,
                dtype=case.dtype,
                tp_group=group,
                collective_host_s=framework.collective_host_s,
                network_host_s=network_host_s,
            )
            self._units[place] = self._book.work(key).priced(pricing)
        return _with_layers(self._units[place], run.layers)


def _with_layers(model: ModelUnits, layers: int) -> ModelUnits:
    """The same model with another number of blocks."""
    first, block, head, loss = model.units
    stream, logits = model.entering_bytes[2:]
    return replace(
        model,
        units=(first, *[block] * layers, head, loss),
        entering_bytes=(0, *[stream] * (layers + 1), logits),
        tied=tuple(replace(tied, units=(0, layers + 1)) for tied in model.tied),
    )


def _ring_group(group: CommGroup, framework: FrameworkSpec, cluster: ClusterSpec) -> CommGroup:
    """The group with what its rings reach of the network."""
    outer = group.outer
    if outer is None or group.ranks_per_node in (1, cluster.gpus_per_node):
        return group
    reached = outer.bandwidth_bytes_per_s * framework.partial_ring_share
    return replace(group, outer=replace(outer, bandwidth_bytes_per_s=reached))


def _replicated_price(
    case: Case, model: ModelUnits, framework: FrameworkSpec, cluster: ClusterSpec
) -> CasePrice:
    """DDP and ZeRO-1, with or without a pipeline."""
    run = case.run
    stages = ReplicatedStages(model, _replicated_layout(case, framework, cluster))
    bounds = stage_bounds(case.shape, run.pp * run.virtual_stages, framework.stage_cuts)
    kinds = _kinds(bounds, model, _boundary_links(cluster, run))
    found = {kind: stages.passes(*kind) for kind in dict.fromkeys(kinds)}
    passes = [found[kind] for kind in kinds]
    pipeline = pipeline_times(
        run.schedule, passes, pp=run.pp, num_microbatches=case.num_microbatches
    )
    held = [bounds[rank :: run.pp] for rank in range(run.pp)]
    ranks = [passes[rank :: run.pp] for rank in range(run.pp)]
    m = case.num_microbatches
    slowest = max(ranks, key=lambda r: sum(p.forward_pass_s + p.backward_pass_s for p in r))
    pace_s = m * sum(p.forward_pass_s + p.backward_pass_s for p in slowest)
    reduction_s = max(
        stages.reduction_s(mine, max(p.backward_pass_s for p in rank))
        for mine, rank in zip(held, ranks, strict=True)
    )
    costs = CostBreakdown(
        compute_s=m * sum(p.forward_s + p.input_backward_s + p.weight_backward_s for p in slowest),
        recompute_s=m * sum(p.recompute_s for p in slowest),
        tp_comm_s=m * sum(p.forward_comm_s + p.backward_comm_s for p in slowest),
        pp_comm_s=m * sum(p.transfer_s for p in slowest),
        dp_comm_s=reduction_s,
        bubble_s=pipeline.step_s - pace_s,
        optimizer_s=max(stages.update_s(mine) for mine in held) + framework.step_s,
    )
    memories = [
        stages.peak(mine, counts) for mine, counts in zip(held, pipeline.in_flight, strict=True)
    ]
    fullest = max(memories, key=lambda each: each.total_bytes)
    usable_bytes = cluster.device.memory_bytes - framework.unusable_bytes
    return CasePrice(
        costs=costs,
        memory=memories[0] if framework.measures_first_rank else fullest,
        fits=fullest.total_bytes <= usable_bytes
        and not leaves_ranks_empty(case.shape, run.pp * run.virtual_stages, framework.stage_cuts),
    )


def _replicated_layout(
    case: Case, framework: FrameworkSpec, cluster: ClusterSpec
) -> ReplicatedLayout:
    run = case.run
    shard_ranks = 1 if run.data_parallel == "ddp" else (run.shard_ranks or run.dp)
    tp_group = comm_group(cluster, degree=run.tp, stride=1)
    congested = (
        cluster.num_nodes >= framework.congested_nodes
        or tp_group.num_nodes >= framework.congested_tp_nodes
    )
    return ReplicatedLayout(
        cluster=cluster,
        framework=framework,
        dtype=case.dtype,
        recompute=case.recompute,
        dp_group=_ring_group(comm_group(cluster, degree=run.dp, stride=run.tp), framework, cluster),
        shard_ranks=shard_ranks,
        shard_group=comm_group(cluster, degree=shard_ranks, stride=run.tp),
        pp_group=comm_group(cluster, degree=run.pp, stride=run.tp * run.dp),
        is_congested=run.pp > 1 and congested,
    )


_StageKind = tuple[int, int, tuple[LinkSpec, LinkSpec]]
"""First unit, one past the last, links to the stages before and behind."""


def _boundary_links(cluster: ClusterSpec, run: Run) -> list[LinkSpec]:
    """The link in front of each stage and behind the last; stages go round the ranks."""
    group = comm_group(cluster, degree=run.pp, stride=run.tp * run.dp)
    node = [rank * run.tp * run.dp // cluster.gpus_per_node for rank in range(run.pp)]
    stages = run.pp * run.virtual_stages
    return [
        group.inner if node[(stage - 1) % run.pp] == node[stage % run.pp] else group.slowest
        for stage in range(stages + 1)
    ]


def _kinds(
    bounds: tuple[tuple[int, int], ...], model: ModelUnits, links: list[LinkSpec]
) -> list[_StageKind]:
    """Each stage; inner ones that are as long and have the same links count as the first."""
    first_of: dict[tuple[int, tuple[LinkSpec, LinkSpec]], _StageKind] = {}
    found = []
    for stage, (first, end) in enumerate(bounds):
        around = links[stage], links[stage + 1]
        kind = (first, end, around)
        inner = 0 < first < end < len(model.units) - 2
        found.append(first_of.setdefault((end - first, around), kind) if inner else kind)
    return found


def _fsdp_price(
    case: Case, model: ModelUnits, framework: FrameworkSpec, cluster: ClusterSpec
) -> CasePrice:
    """ZeRO-2 and ZeRO-3, as the emitted script runs them."""
    run = case.run
    shards = run.shard_ranks or run.dp
    configuration = Configuration(
        degrees=ParallelDegrees(dp_replicate=run.dp // shards, dp_shard=shards, tp=run.tp, pp=1),
        schedule="none",
        virtual_stages=1,
        microbatch_size=run.microbatch_size,
        num_microbatches=case.num_microbatches,
        reshard_after_forward=run.data_parallel == "zero3",
        sequence_parallel=run.sequence_parallel,
    )
    model = _whole_epilogue(model)
    table = StageTable(model, configuration, cluster, _gradients(framework))
    kinds = ("none", *_block_kinds(case), "none")
    seconds = table.seconds(0, len(model.units), kinds)
    costs = step_costs(configuration, [seconds])
    held = HeldStage(first=0, end=len(model.units), kinds=kinds, in_flight=1)
    memory = _reserved(table.memory.peak([held]), framework)
    moved = framework.optimizer_moved_bytes / (OPTIMIZER_PASSES * _MASTER_BYTES)
    return CasePrice(
        costs=replace(
            costs,
            tp_comm_s=costs.tp_comm_s * (1 - framework.tp_overlap),
            optimizer_s=moved * costs.optimizer_s + framework.step_s,
        ),
        memory=memory,
        fits=memory.total_bytes + framework.unusable_bytes <= cluster.device.memory_bytes,
    )


def _block_kinds(case: Case) -> list[str]:
    """Recomputation of every block."""
    if case.recompute != EVERY_OTHER_LAYER:
        return [case.recompute] * case.run.layers
    return ["none" if index % 2 else "full" for index in range(case.run.layers)]


def _reserved(memory: MemoryBreakdown, framework: FrameworkSpec) -> MemoryBreakdown:
    """What the allocator takes: shards of gradients cannot reuse the memory of activations.

    They are made on the stream that reduces, and the allocator keeps memory by stream.
    """
    grads_bytes = round(memory.params_bytes * framework.state.gradient / _MASTER_BYTES)
    return replace(
        memory,
        grads_bytes=max(memory.grads_bytes, grads_bytes),
        reserve_bytes=round(framework.reserve_bytes),
    )


def _gradients(framework: FrameworkSpec) -> GradientTraffic:
    """What reducing gradients moves, by the framework's bytes per float32 parameter."""
    return GradientTraffic(
        wire=framework.gradient_wire_bytes / _MASTER_BYTES,
        copied=framework.accumulated_bytes / _MASTER_BYTES,
    )


def _whole_epilogue(model: ModelUnits) -> ModelUnits:
    """Head and loss as the one unit that they are in the emitted script."""
    *others, head, loss = model.units
    together = replace(
        head,
        forward_s=head.forward_s + loss.forward_s,
        backward_s=head.backward_s + loss.backward_s,
        weight_backward_s=head.weight_backward_s + loss.weight_backward_s,
        forward_comm_s=head.forward_comm_s + loss.forward_comm_s,
        backward_comm_s=head.backward_comm_s + loss.backward_comm_s,
        activation_bytes={
            kind: size + loss.activation_bytes[kind] for kind, size in head.activation_bytes.items()
        },
        temporary_bytes={
            kind: max(size, loss.temporary_bytes[kind])
            for kind, size in head.temporary_bytes.items()
        },
    )
    return replace(model, units=(*others, together), entering_bytes=model.entering_bytes[:-1])
