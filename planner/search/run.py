"""The search: from a traced model and a cluster to the best plan, with its proof."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from planner.errors import CodegenError, InfeasiblePlanError, RequestError
from planner.framework.script import SCRIPT
from planner.graph.sizes.family import GraphFamily
from planner.hardware.spec import ClusterSpec
from planner.plan.record import ModuleRow, OpRow, TrafficRow
from planner.plan.types import Plan, Reason, Rejection, SearchOutcome, SolverReport
from planner.pricing.module_rows import module_rows
from planner.pricing.op_rows import op_rows
from planner.pricing.traffic_rows import traffic_rows
from planner.search.decide import Decision
from planner.search.decode import decode_plan
from planner.search.incumbents import Incumbents
from planner.search.infeasible import Resize, nothing_fits, smallest
from planner.search.mixed_space import layout_space
from planner.search.refusals import refusal
from planner.search.rule_of_thumb import rule_of_thumb
from planner.search.search_request import SearchRequest
from planner.search.visits import NEAR_SHARE
from planner.strategy.configuration import Configuration
from planner.strategy.fixed_rules import inputs_rule, offload_rule
from planner.strategy.mesh import ParallelDegrees
from planner.strategy.parameter_rules import OF_ANY_LAYOUT
from planner.strategy.rules import LONG_SEQUENCE
from planner.vocabulary import PLANNED_AXES, Recomputation

_THE_SCRIPT = "the script"
"""Rule of what the training script cannot run."""

_FASTEST_OVER_CP = "layouts over tp for those over cp that are fastest by themselves"
"""What one holds that has tp inside cp."""

_OFFLOADS = (("activation_offload",), ("cpu_offload",), ("activation_offload", "cpu_offload"))
"""What is tried in host memory where nothing fits: what takes less time first."""

_NOT_TRIED = "degrees that are tried"
_WHEN_TRIED = (
    "no degrees that are tried keep what is fixed; cp above 1 is tried where it is fixed, for "
    f"samples of {LONG_SEQUENCE} tokens or more, and where a step has fewer samples than devices"
)
"""Why nothing was refused and nothing is legal."""

_UNPAID = "splitting does not pay"
_FOUND_LATE = (_THE_SCRIPT, _UNPAID, "nothing to split")
"""Rules of layouts that were refused when they were laid out."""


class Search:
    """One search over the layouts of a model on a cluster."""

    def __init__(
        self, graphs: GraphFamily, cluster: ClusterSpec, request: SearchRequest, *, resize: Resize
    ) -> None:
        """Set up.

        Args:
            graphs: The model at every microbatch size.
            cluster: Devices and links.
            request: What to search for.
            resize: Gives the cluster with another number of devices, to say what would fit.
        """
        self._space = layout_space(graphs, cluster, request)
        self._request = request
        self._cluster = cluster
        self._resize = resize
        self._rejections: list[Rejection] = []

    def module_rows(self, plan: Plan) -> tuple[ModuleRow, ...]:
        """Modules of a plan of this search that are split over tp or stay whole."""
        return tuple(
            row
            for pricer, stages in self._space.pricers(plan)
            for row in module_rows(plan, pricer, stages)
        )

    def op_rows(self, plan: Plan) -> tuple[OpRow, ...]:
        """Every forward op of a plan of this search with its price on one rank."""
        return tuple(
            row
            for pricer, stages in self._space.pricers(plan)
            for row in op_rows(plan, pricer, stages)
        )

    def traffic_rows(self, plan: Plan) -> tuple[TrafficRow, ...]:
        """Collectives of a plan of this search."""
        return tuple(
            row
            for pricer, stages in self._space.pricers(plan)
            for row in traffic_rows(plan, pricer, stages)
        )

    def run(self) -> SearchOutcome:
        """Find the best plan and prove it.

        Where its layouts turn out not to run at its own microbatch size, all is decided again
        with what runs. Host memory is used where it is asked for, or else nothing fits.

        Raises:
            RequestError: The model's shapes allow no layout.
            InfeasiblePlanError: No layout fits the memory.
            SolverError: The solver found nothing within the limit.
        """
        while True:
            decision, report = self._decided_somewhere()
            best = decision.incumbents.ranked()[0].search
            if self._space.confirm(best.priced.choice):
                break
        candidates = self._candidates(decision.incumbents)
        return SearchOutcome(
            best=candidates[0],
            candidates=tuple(candidates),
            rule_of_thumb=rule_of_thumb(self._space),
            rejections=(*self._rejections, *decision.visits.rejections()),
            solver=report,
        )

    def _decided_somewhere(self) -> tuple[Decision, SolverReport]:
        """Decide with all on the devices, and with more on their hosts where that does not fit."""
        try:
            return self._decided()
        except InfeasiblePlanError as error:
            on_device = error
        for words, request in list(self._on_hosts()):
            self._space = layout_space(self._space.graphs, self._cluster, request)
            try:
                return self._decided()
            except (InfeasiblePlanError, RequestError, CodegenError) as error:
                on_host = str(error).replace("\n", ". ").removesuffix(".")
                on_device.hint += f" Nor does it fit with {words}: {on_host}."
        raise on_device

    def _on_hosts(self) -> Iterator[tuple[str, SearchRequest]]:
        """What may be in host memory where that is open and possible, as a request for each."""
        given, facts = self._request.fixed, self._space.facts
        may_recompute = given.activation_checkpointing in (None, Recomputation.FULL)
        may_recompute &= Recomputation.FULL not in facts.recompute_refusals
        for names in _OFFLOADS:
            changes: Any = dict.fromkeys(names, True)
            fixed = replace(given, **changes)
            rule = offload_rule(fixed, self._cluster)
            if "activation_offload" in names:
                rule = rule or inputs_rule(ParallelDegrees(pp=given.pp or 1), facts, fixed)
            helps = may_recompute or "activation_offload" not in names
            helps = helps and ("cpu_offload" in names or self._space.state_fits())
            is_open = all(getattr(given, name) is None for name in names)
            if helps and is_open and rule is None and self._space.framework.name == SCRIPT:
                words = " and ".join(f"{name}=true" for name in names)
                yield words, replace(self._request, fixed=fixed)

    def _decided(self) -> tuple[Decision, SolverReport]:
        """Decide among all configurations; raises what ``run`` does."""
        legal, self._rejections = self._space.legal()
        if not legal:
            raise self._nothing_legal()
        if not self._space.state_fits():
            # No need to price them all to know that nothing fits, only the smallest.
            legal = smallest(legal)
        decision = Decision(
            self._space.prospects(legal),
            top=self._request.top,
            time_limit_s=self._request.time_limit_s,
            others=self._space.in_other_orders,
            has_orders=self._space.has_orders,
        )
        report = decision.decide()
        self._rejections += self._unsplit(legal, decision)
        if not decision.visits.searches:
            raise self._nothing_legal()
        orders = self._space.orders.limits((each.degrees for each in legal), NEAR_SHARE)
        orders += self._space.limits
        if any(len(each.degrees.split_axes) > 1 for each in legal):
            orders += (_FASTEST_OVER_CP,)
        report = replace(report, limits=(*report.limits, *orders))
        if not decision.incumbents.solved:
            raise nothing_fits(self._space, decision.visits.searches, self._resize)
        return decision, report

    def _unsplit(self, legal: Sequence[Configuration], decision: Decision) -> Iterator[Rejection]:
        """Refuse the configurations that turned out to have no layout."""
        known = {id(each) for bounded in decision.visits.bounded for each in bounded.stands_for}
        return (self._unsplit_one(each) for each in legal if id(each) not in known)

    def _unsplit_one(self, configuration: Configuration) -> Rejection:
        """Say why a configuration has no layout over its axes."""
        degrees = configuration.degrees
        axes = tuple((str(axis), int(getattr(degrees, axis))) for axis in degrees.split_axes)
        split = " and ".join(f"{axis} {size}" for axis, size in axes)
        reason = self._space.reason(axes)
        if reason is None and self._space.is_unpaid(axes):
            detail = (
                f"with {split} each module is faster whole than split, by the "
                "times of these devices and links: all ranks would compute the same"
            )
            return refusal(configuration, rule=_UNPAID, why=partial(Reason, detail=detail))
        if reason is None:
            detail = f"no module of the model can be split over {split}"
            if self._request.fixed.sequence_parallel:
                detail += " with sequence_parallel=true; with false more modules may be"
            why = partial(Reason, detail=detail)
            return refusal(configuration, rule="nothing to split", why=why)
        detail = f"the script cannot run {split}: {reason}"
        return refusal(configuration, rule=_THE_SCRIPT, why=partial(Reason, detail=detail))

    def _candidates(self, incumbents: Incumbents) -> list[Plan]:
        """The best choice of every configuration that was priced, fastest first."""
        plans: list[Plan] = []
        seen: set[Configuration] = set()
        for solved in incumbents.ranked():
            layout = solved.search.configuration.in_default_order
            if layout not in seen:
                seen.add(layout)
                plans.append(decode_plan(solved.search, solved.columns, self._space.context))
        return plans

    def _nothing_legal(self) -> RequestError | CodegenError:
        rules: dict[str, str] = {}
        for rejection in self._rejections:
            rules.setdefault(rejection.rule, rejection.why().detail)
        if not rules:
            rules[_NOT_TRIED] = _WHEN_TRIED
        kind = CodegenError if _THE_SCRIPT in rules else RequestError
        return kind(
            f"no layout of {self._cluster.num_gpus} GPUs is legal for this model and a global "
            f"batch of {self._request.global_batch_size}: " + "; ".join(rules.values()),
            hint="" if OF_ANY_LAYOUT in rules else self._what_works(),
        )

    def _what_works(self) -> str:
        """The axes that the model's facts leave, of which the script has refused none."""
        axes = [axis for axis in PLANNED_AXES if getattr(self._request.fixed, axis) is not None]
        opened: Any = dict.fromkeys(axes)
        free = replace(self._request, fixed=replace(self._request.fixed, **opened))
        legal, _ = layout_space(self._space.graphs, self._cluster, free, tries_all=True).legal()
        unsplit = {each.degrees.split_axes for each in self._rejections if each.rule in _FOUND_LATE}
        left = [each.degrees for each in legal if each.degrees.split_axes not in unsplit - {()}]
        possible = [axis for axis in PLANNED_AXES if any(getattr(d, axis) > 1 for d in left)]
        if not axes or not possible:
            return "change the number of GPUs or the global batch size, or fix fewer values"
        example = min(left, key=lambda d: sum(getattr(d, axis) > 1 for axis in PLANNED_AXES))
        fixes = [
            f"--fix {axis}={getattr(example, axis)}"
            for axis in PLANNED_AXES
            if getattr(example, axis) > 1
        ]
        return (
            f"what the model's shapes allow on {self._cluster.num_gpus} GPUs: "
            f"{', '.join(possible)} ({' '.join(fixes)}, for example)"
        )
