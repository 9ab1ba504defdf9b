"""The price of a case: a run's layout as ``plan estimate`` prices it for its framework."""

from dataclasses import dataclass, replace
from functools import lru_cache

from planner.cost.breakdown import CostBreakdown, MemoryBreakdown
from planner.cost.model_units import ModelUnits, ModelWork
from planner.cost.step import price_layout, rank_spec
from planner.framework.constants import PROFILES_OWN, Constants, in_place
from planner.framework.script import on_parts
from planner.framework.spec import FrameworkSpec
from planner.hardware.mixed import parse_parts
from planner.hardware.profiles import load_cluster
from planner.hardware.spec import ClusterSpec
from planner.hardware.topology import CommGroup
from planner.pricing.reprice import plan_works, price_plan
from planner.strategy.configuration import Configuration
from planner.strategy.mesh import ParallelDegrees
from planner.strategy.placement import ranks_per_core
from planner.validation.pricing.cases import AnyCase, Case
from planner.validation.pricing.plan_case import PlanCase
from planner.validation.pricing.workbook import WorkBook, WorkKey


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
def _cluster(name: str, gpus: int, gpus_per_node: int | None) -> ClusterSpec:
    return load_cluster(name, gpus=gpus, gpus_per_node=gpus_per_node)


_Place = tuple[str, str, int, int | None]
"""Framework, cluster, ranks, ranks per node."""


class CasePricer:
    """Prices cases; what one question has counted or priced serves the next."""

    def __init__(self, book: WorkBook | None = None) -> None:
        """Count nothing yet, or share what others have counted."""
        self._book = WorkBook() if book is None else book
        self._constants = PROFILES_OWN
        self._placed: dict[_Place, tuple[FrameworkSpec, ClusterSpec]] = {}
        self._works: dict[str, tuple[ModelWork, ...]] = {}
        self._units: dict[tuple[str, str, WorkKey, CommGroup, float], ModelUnits] = {}

    def price(self, case: AnyCase, constants: Constants = PROFILES_OWN) -> CasePrice:
        """Price one case.

        Args:
            case: The run.
            constants: What takes the place of the profiles' numbers.

        Raises:
            PlannerError: The run's ranks do not fill the cluster's nodes, or its model cannot
                be traced.
        """
        if constants != self._constants:
            self._constants, self._placed, self._units = constants, {}, {}
        if isinstance(case, PlanCase):
            return self._plan_price(case, constants)
        framework, cluster = self._in_place(case)
        configuration = case_configuration(case, cluster)
        price = price_layout(
            self._model(case, framework, cluster, configuration),
            configuration=configuration,
            recompute=case.recompute,
            cluster=cluster,
            framework=framework,
        )
        first = framework.measures_first_rank
        return CasePrice(
            costs=price.costs,
            memory=price.memory_by_rank[0] if first else price.peak_memory,
            fits=price.fits,
        )

    def _plan_price(self, case: PlanCase, constants: Constants) -> CasePrice:
        """Price a plan: its layouts stay what they were made with, whatever the constants."""
        saved = case.run.saved
        placed = _placed(case, case.constants if constants == PROFILES_OWN else constants)
        if saved.digest not in self._works:
            framework, cluster = _placed(case, case.constants)
            works = plan_works(saved.plan, case.graphs, cluster, framework)
            self._works[saved.digest] = works
        price = price_plan(saved.plan, self._works[saved.digest], placed[1], placed[0])
        memory = price.peak_memory
        return CasePrice(
            costs=price.costs,
            memory=replace(memory, reserve_bytes=0) if case.run.is_allocated else memory,
            fits=price.fits,
        )

    def _in_place(self, case: Case) -> tuple[FrameworkSpec, ClusterSpec]:
        """The case's framework and cluster with the constants put in their place."""
        key = (case.framework.name, case.cluster, case.run.num_gpus, case.gpus_per_node)
        if key not in self._placed:
            self._placed[key] = _placed(case, self._constants)
        return self._placed[key]

    def _model(
        self,
        case: Case,
        framework: FrameworkSpec,
        cluster: ClusterSpec,
        configuration: Configuration,
    ) -> ModelUnits:
        """Its priced units; of three blocks they are priced once for all numbers of blocks."""
        key = WorkKey(
            shape=replace(case.shape, layers=0),
            dtype=case.dtype,
            kernels=case.framework.kernels,
            tp=configuration.degrees.tp,
            sequence_parallel=configuration.sequence_parallel,
            microbatch_size=configuration.microbatch_size,
            float8=configuration.float8,
        )
        rank = rank_spec(cluster, framework, configuration, case.dtype)
        group = rank.tp_group
        place = (framework.name, case.cluster, key, group, rank.network_host_s)
        if place not in self._units:
            self._units[place] = self._book.work(key).priced(rank)
        return self._units[place].with_blocks(case.run.layers)


def _placed(case: AnyCase, constants: Constants) -> tuple[FrameworkSpec, ClusterSpec]:
    """A case's framework and cluster with constants put in their place."""
    if parts := parse_parts(case.cluster):
        clusters = (_cluster(name, gpus, None) for name, gpus in parts)
        return on_parts(
            [in_place(case.framework, each, constants, is_part=True) for each in clusters]
        )
    cluster = _cluster(case.cluster, case.run.num_gpus, case.gpus_per_node)
    return in_place(case.framework, cluster, constants)


def case_configuration(case: Case, cluster: ClusterSpec) -> Configuration:
    """The configuration that a run used on its cluster."""
    run = case.run
    form = case.framework.state_form
    is_ddp = form == "replicated" and run.data_parallel == "ddp"
    shards = 1 if is_ddp else run.shard_ranks or run.dp
    degrees = ParallelDegrees(dp_replicate=run.dp // shards, dp_shard=shards, tp=run.tp, pp=run.pp)
    return Configuration(
        degrees=degrees,
        ranks_per_core=ranks_per_core(cluster, degrees),
        schedule=run.schedule,
        virtual_stages=run.virtual_stages,
        microbatch_size=run.microbatch_size,
        num_microbatches=case.num_microbatches,
        # As torchtitan has it: gathers of every microbatch are not worth their memory there.
        reshard_after_forward=run.data_parallel == "zero3" and run.pp == 1,
        sequence_parallel=run.sequence_parallel and run.tp > 1,
        float8=run.float8,
        state_form=form,
    )
