"""The layouts of one model on one cluster: what is legal, and what each costs."""

from collections.abc import Iterator
from dataclasses import dataclass

from planner.cost.stage_table import StageTable
from planner.cost.unit_pricing import master_bytes
from planner.graph.analysis.retained import RECOMPUTATIONS
from planner.graph.sizes.family import GraphFamily
from planner.hardware.spec import ClusterSpec
from planner.plan.types import ModelRef, Rejection
from planner.search.columns import ColumnMaker, FrontCache
from planner.search.configuration_search import ConfigurationSearch
from planner.search.decode import PlanContext
from planner.search.model_pricing import ModelPricer, ShardingChoice
from planner.strategy.configuration import Configuration
from planner.strategy.facts import ModelFacts, model_facts
from planner.strategy.rules import (
    BrokenRule,
    FixedValues,
    broken_rule,
    configurations,
    enumerate_degrees,
    recomputation_rule,
)
from planner.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """What to search for; every value is resolved."""

    model: ModelRef
    """What is trained."""
    global_batch_size: int
    """Samples per step."""
    dtype: str
    """Compute dtype."""
    fixed: FixedValues
    """Values to keep."""
    top: int
    """Layouts to show."""
    time_limit_s: float
    """Time after which the search proves no more and shows the gap."""


class LayoutSpace:
    """Configurations of one model on one cluster with their prices."""

    def __init__(self, graphs: GraphFamily, cluster: ClusterSpec, request: SearchRequest) -> None:
        """Read the model's sizes; nothing is priced yet."""
        self.graphs = graphs
        self.cluster = cluster
        self.request = request
        self.facts: ModelFacts = model_facts(graphs.at(1))
        self.context = PlanContext(
            model=request.model,
            global_batch_size=request.global_batch_size,
            dtype=request.dtype,
        )
        self.pricer = ModelPricer(graphs, cluster, request.dtype, time_limit_s=request.time_limit_s)
        self._fronts: dict[ShardingChoice, FrontCache] = {}

    def legal(self) -> tuple[list[Configuration], list[Rejection]]:
        """All configurations that the model's shapes allow, and the refused degrees."""
        found: list[Configuration] = []
        refused: list[Rejection] = []
        request = self.request
        for degrees in enumerate_degrees(self.cluster.num_gpus, request.fixed):
            rule = broken_rule(degrees, self.facts, request.global_batch_size)
            rule = rule or recomputation_rule(self.facts, request.fixed)
            items: Iterator[Configuration | BrokenRule] = (
                configurations(degrees, self.facts, request.global_batch_size, request.fixed)
                if rule is None
                else iter([rule])
            )
            for item in items:
                if isinstance(item, Configuration):
                    found.append(item)
                else:
                    refused.append(Rejection(degrees=degrees, rule=item.rule, detail=item.detail))
        return found, refused

    def state_fits(self) -> bool:
        """Whether parameters, gradients and optimiser states fit, spread over all devices."""
        device = self.cluster.device
        state_bytes = 4 * master_bytes(self.request.dtype) * self.graphs.at(1).num_parameters
        return state_bytes / self.cluster.num_gpus <= device.memory_bytes - device.reserve_bytes

    def searches(
        self, configuration: Configuration, *, kind: str | None = None
    ) -> Iterator[ConfigurationSearch]:
        """Price a configuration, with vocabulary-sized weights split over tp and whole.

        Args:
            configuration: What to price.
            kind: Recomputation of all blocks, None for what the request says.
        """
        tp = configuration.degrees.tp
        kind = kind or self.request.fixed.activation_checkpointing
        kinds = [
            each
            for each in (RECOMPUTATIONS if kind is None else (kind,))
            if each not in self.facts.recompute_refusals
        ]
        if not kinds:
            return
        for split in (True, False) if tp > 1 else (False,):
            choice = ShardingChoice(
                tp=tp,
                sequence_parallel=configuration.sequence_parallel,
                split_tables=split,
                microbatch_size=configuration.microbatch_size,
            )
            priced = self.pricer.priced(choice)
            if priced is not None:
                table = StageTable(priced.model, configuration, self.cluster)
                fronts = self._fronts.setdefault(choice, {})
                maker = ColumnMaker(table, kinds=kinds, known_fronts=fronts)
                yield ConfigurationSearch(configuration, priced, table, maker)


def refusal(
    configuration: Configuration, *, rule: str, detail: str, peak_memory_bytes: int | None = None
) -> Rejection:
    """Write down why a configuration is refused."""
    return Rejection(
        degrees=configuration.degrees,
        rule=rule,
        detail=detail,
        schedule=configuration.schedule,
        microbatch_size=configuration.microbatch_size,
        peak_memory_bytes=peak_memory_bytes,
    )


def memory_refusal(search: ConfigurationSearch) -> Rejection:
    """Say how much memory a configuration needs at the least."""
    need = search.least_memory()
    capacity = search.table.device.memory_bytes
    return refusal(
        search.configuration,
        rule="memory",
        detail=f"an even cut with {need.kinds_words} needs {need.memory.total_bytes / GIB:.1f} GiB "
        f"on pipeline rank {need.rank}; the device has {capacity / GIB:.1f} GiB",
        peak_memory_bytes=need.memory.total_bytes,
    )
