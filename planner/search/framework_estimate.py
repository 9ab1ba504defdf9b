"""The price of a layout under a framework other than the emitted script.

Such a framework cuts stages and splits blocks by its own rules, so that nothing is searched: what
the request leaves open (microbatch size, recomputation, schedule) is tried out.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from planner.cost.pipeline import SPLIT_SCHEDULES
from planner.cost.stage_costs import StageCosts
from planner.cost.step import StepPrice, framework_stages, price_layout, rank_spec
from planner.errors import InfeasiblePlanError, RequestError
from planner.graph.sizes.family import GraphFamily
from planner.hardware.spec import ClusterSpec
from planner.plan.record import ModuleRow, OpRow, TrafficRow
from planner.plan.types import Plan, Reason, Rejection, SearchOutcome, SolverReport
from planner.pricing.choice import ShardingChoice
from planner.pricing.model_pricing import LaidOut, PricedModel
from planner.pricing.module_rows import module_rows
from planner.pricing.op_rows import op_rows
from planner.search.decode import plan_of
from planner.search.refusals import refusal
from planner.search.search_request import SearchRequest
from planner.search.space import LayoutSpace
from planner.strategy.configuration import Configuration
from planner.units import format_bytes
from planner.vocabulary import RECOMPUTATIONS


class FrameworkEstimate:
    """Prices the layouts that a request allows, and keeps the fastest that fits."""

    def __init__(self, graphs: GraphFamily, cluster: ClusterSpec, request: SearchRequest) -> None:
        """Set up.

        Args:
            graphs: The model at every microbatch size.
            cluster: Devices and links.
            request: What is fixed, and the framework.
        """
        self._space = LayoutSpace(graphs, cluster, request)
        self._cluster = cluster
        self._request = request
        self._framework = request.framework

    def module_rows(self, plan: Plan) -> tuple[ModuleRow, ...]:
        """Modules of a plan of this search that are split over tp or stay whole."""
        return module_rows(plan, self._space.pricer, plan.stages)

    def op_rows(self, plan: Plan) -> tuple[OpRow, ...]:
        """Every forward op of a plan with its price on one rank."""
        return op_rows(plan, self._space.pricer, plan.stages)

    def traffic_rows(self, _: Plan) -> tuple[TrafficRow, ...]:
        """None: what the emitted script moves is known, and no other framework's."""
        return ()

    def run(self) -> SearchOutcome:
        """Price what is allowed.

        Raises:
            RequestError: The model's shapes allow no such layout.
            InfeasiblePlanError: None fits the memory.
        """
        priced = {(c, kind): self.price(c, kind) for c, kind in self.allowed()}
        fitting = {key: price for key, price in priced.items() if price.fits}
        if not fitting:
            raise self._nothing_fits(priced)
        ranked = sorted(fitting, key=lambda key: fitting[key].costs.step_time_s)
        plans = tuple(self._plan(*key) for key in ranked)
        best_s = plans[0].costs.step_time_s
        return SearchOutcome(
            best=plans[0],
            candidates=plans,
            rule_of_thumb=None,
            rejections=tuple(self._refused(*key) for key in priced if key not in fitting),
            solver=SolverReport(status="optimal", objective_s=best_s, bound_s=best_s),
        )

    def price(self, configuration: Configuration, recompute: str) -> StepPrice:
        """Price one layout.

        Args:
            configuration: Degrees, schedule, microbatches.
            recompute: Recomputation of all blocks.

        Raises:
            RequestError: No module of the model can be split over its tp.
        """
        return price_layout(
            self._priced(configuration).model,
            configuration=configuration,
            recompute=recompute,
            cluster=self._cluster,
            framework=self._framework,
        )

    def _priced(self, configuration: Configuration) -> PricedModel:
        tp = configuration.degrees.tp
        rank = rank_spec(self._cluster, self._framework, configuration, self._request.dtype)
        choice = ShardingChoice(
            tp=tp,
            sequence_parallel=configuration.sequence_parallel,
            split_tables=self._space.facts.can_split_tables(tp),
            microbatch_size=configuration.microbatch_size,
            compile=configuration.compile,
            float8=configuration.float8,
        )
        priced = self._space.pricer.priced(choice, network_host_s=rank.network_host_s)
        if priced is None:
            raise RequestError(
                f"--fix tp={tp}: no module of the model can be split over it",
                hint="Use --fix tp=1.",
            )
        return priced

    def allowed(self) -> Iterator[tuple[Configuration, str]]:
        """Configurations with a recomputation each, by what is fixed.

        Raises:
            RequestError: There is none.
        """
        schedule = self._request.fixed.schedule
        if schedule in SPLIT_SCHEDULES and not self._framework.splits_backward:
            raise RequestError(
                f"--fix schedule={schedule}: {self._framework.name} does not put off the part of "
                "a backward that only gradients of parameters need",
                hint='Name a framework whose profile says: backward = "split".',
            )
        legal, refused = self._space.legal()
        form = self._framework.state_form
        found = dict.fromkeys(
            replace(each, state_form=form, reshard_after_forward=False)
            if form == "replicated"
            else each
            for each in legal
        )
        if not found:
            raise RequestError(
                "the layout is not legal for this model: "
                + "; ".join(dict.fromkeys(each.why().detail for each in refused)),
                hint="change the number of GPUs or the global batch size, or fix other values",
            )
        fixed = self._request.fixed.activation_checkpointing
        for configuration in found:
            for kind in RECOMPUTATIONS if fixed is None else (fixed,):
                if kind not in self._space.facts.recompute_refusals:
                    yield configuration, kind

    def _plan(self, configuration: Configuration, recompute: str) -> Plan:
        priced = self._priced(configuration)
        stages = framework_stages(
            priced.model,
            self._framework,
            num_stages=configuration.num_stages,
            recompute=recompute,
        )
        if any(stage.first == stage.end for stage in stages):
            raise RequestError(
                f"{self._framework.name} leaves a pipeline stage without a part of the model",
                hint="Use fewer stages.",
            )
        costs = StageCosts(priced.model, configuration, self._cluster, self._framework)
        laid_out = LaidOut(priced=priced, units=range(len(costs.units)))
        return plan_of(costs, [laid_out], stages, self._space.context)

    def _refused(self, configuration: Configuration, recompute: str) -> Rejection:
        memory = self.price(configuration, recompute).peak_memory
        return refusal(
            configuration,
            rule="memory",
            why=partial(
                Reason,
                detail=f"recomputing {recompute} needs {format_bytes(memory.total_bytes)}; the "
                f"device has {self._cluster.device.capacity_words}",
                peak_memory_bytes=memory.total_bytes,
            ),
        )

    def _nothing_fits(
        self, priced: dict[tuple[Configuration, str], StepPrice]
    ) -> InfeasiblePlanError:
        least = min(priced.values(), key=lambda price: price.peak_memory.total_bytes)
        need = least.peak_memory.total_bytes
        capacity = self._cluster.device.capacity_bytes - round(self._framework.unusable_bytes)
        rank = least.memory_by_rank.index(least.peak_memory)
        if need <= capacity:
            return InfeasiblePlanError(
                f"{self._framework.name} leaves pipeline ranks without a part of the model",
                hint="Use fewer stages.",
                shortfall_bytes_by_stage={},
            )
        return InfeasiblePlanError(
            f"{self._framework.name} needs {format_bytes(need)} of {format_bytes(capacity)} on "
            f"pipeline rank {rank}: short by {format_bytes(need - capacity)}",
            hint="Fix other degrees, or use more devices.",
            shortfall_bytes_by_stage={rank: need - capacity},
        )
