"""The search: from a traced model and a cluster to the best plan, with its proof.

Configurations are taken in the order of a cheap lower bound. Each gets a partition (an
incumbent) and a sharper bound; the joint ILP then decides among those whose bound is below the
best incumbent, and its result cannot be beaten by the others.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from planner.cost.stage_table import StageTable
from planner.errors import InfeasiblePlanError, RequestError, SolverError
from planner.graph.family import GraphFamily
from planner.hardware.spec import ClusterSpec
from planner.plan.types import ModelRef, Plan, Rejection, SearchOutcome, SolverReport
from planner.search.columns import Column, ColumnMaker, MixCache
from planner.search.configuration_search import ConfigurationSearch
from planner.search.decode import PlanContext, decode_plan
from planner.search.model_pricing import ModelPricer, PricedModel, ShardingChoice
from planner.search.stage_ilp import StageProblem, solve_stages
from planner.strategy.configuration import Configuration
from planner.strategy.facts import ModelFacts, model_facts
from planner.strategy.rules import (
    BrokenRule,
    FixedValues,
    broken_rule,
    configurations,
    enumerate_degrees,
)


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
    """Candidates to solve exactly."""
    time_limit_s: float
    """Limit for the solver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Solved:
    """An incumbent of one configuration."""

    search: ConfigurationSearch
    columns: tuple[Column, ...]
    objective_s: float


class _Incumbents:
    """The best solutions so far."""

    def __init__(self, top: int) -> None:
        self.solved: list[_Solved] = []
        self._top = top
        self._best_by_layout: dict[tuple[object, str], float] = {}

    def add(self, solved: _Solved) -> None:
        """Take a solution in; layouts count once, by degrees and schedule."""
        self.solved.append(solved)
        configuration = solved.search.configuration
        key = (configuration.degrees, configuration.schedule)
        known = self._best_by_layout.get(key, float("inf"))
        self._best_by_layout[key] = min(known, solved.objective_s)

    def nth_s(self, place: int) -> float:
        """Step time of the layout in that place; endless where there are fewer."""
        times = sorted(self._best_by_layout.values())
        return times[place - 1] if len(times) >= place else float("inf")

    @property
    def limit_s(self) -> float:
        """Step time that a configuration must beat to be among the layouts to show."""
        return self.nth_s(self._top)

    def ranked(self) -> list[_Solved]:
        """All solutions, fastest first."""
        return sorted(self.solved, key=lambda solved: solved.objective_s)


class Planner:
    """Searches the layouts of one model on one cluster."""

    def __init__(self, graphs: GraphFamily, cluster: ClusterSpec, request: SearchRequest) -> None:
        """Read the model's sizes; nothing is priced yet."""
        self._cluster = cluster
        self._request = request
        self._pricer = ModelPricer(
            graphs, cluster, request.dtype, time_limit_s=request.time_limit_s
        )
        self._facts: ModelFacts = model_facts(graphs.at(1))
        self._context = PlanContext(
            model=request.model,
            global_batch_size=request.global_batch_size,
            dtype=request.dtype,
        )
        self._mixes: dict[tuple[ShardingChoice, str | None], MixCache] = {}
        self._rejections: list[Rejection] = []

    # -- pieces -----------------------------------------------------------------------------------

    def _configurations(self) -> Iterator[Configuration]:
        """Legal configurations; broken rules are noted."""
        request = self._request
        for degrees in enumerate_degrees(self._cluster.num_gpus, request.fixed):
            rule = broken_rule(degrees, self._facts, request.global_batch_size)
            found = (
                [rule]
                if rule is not None
                else configurations(degrees, self._facts, request.global_batch_size, request.fixed)
            )
            for item in found:
                if isinstance(item, BrokenRule):
                    self._rejections.append(
                        Rejection(degrees=degrees, rule=item.rule, detail=item.detail)
                    )
                else:
                    yield item

    def searches(self, configuration: Configuration) -> Iterator[ConfigurationSearch]:
        """Price a configuration, with vocabulary-sized weights split over tp and whole."""
        tp = configuration.degrees.tp
        for split in (True, False) if tp > 1 else (False,):
            choice = ShardingChoice(
                tp=tp,
                sequence_parallel=configuration.sequence_parallel,
                split_tables=split,
                microbatch_size=configuration.microbatch_size,
            )
            priced = self._pricer.priced(choice)
            if priced is not None:
                yield self._search(configuration, priced, choice)

    def _search(
        self, configuration: Configuration, priced: PricedModel, choice: ShardingChoice
    ) -> ConfigurationSearch:
        kind = self._request.fixed.activation_checkpointing
        table = StageTable(priced.model, configuration, self._cluster)
        mixes = self._mixes.setdefault((choice, kind), {})
        maker = ColumnMaker(table, fixed_kind=kind, known_mixes=mixes)
        return ConfigurationSearch(configuration, priced, table, maker)

    def _refuse_memory(self, search: ConfigurationSearch) -> None:
        peak_bytes, rank, _ = search.least_memory()
        configuration = search.configuration
        capacity = self._cluster.device.memory_bytes
        self._rejections.append(
            Rejection(
                degrees=configuration.degrees,
                rule="memory",
                detail=f"needs {peak_bytes / 2**30:.1f} GiB on pipeline rank {rank} with full "
                f"recomputation, the device has {capacity / 2**30:.1f} GiB",
                schedule=configuration.schedule,
                microbatch_size=configuration.microbatch_size,
                peak_memory_bytes=peak_bytes,
            )
        )

    # -- the search -------------------------------------------------------------------------------

    def run(self) -> SearchOutcome:
        """Find the best plan and prove it.

        Raises:
            RequestError: The model's shapes allow no layout.
            InfeasiblePlanError: No layout fits the memory.
            SolverError: The solver found nothing within the limit.
        """
        legal = list(self._configurations())
        if not legal:
            raise self._nothing_legal()
        searches = self._bounded(legal)
        incumbents = _Incumbents(self._request.top)
        for search in searches:
            if search.configuration.virtual_stages == 1:
                self._partition(search, incumbents)
        for search in searches:
            if search.configuration.virtual_stages > 1:
                self._interleave(search, incumbents)
        if not incumbents.solved:
            raise self._nothing_fits(searches)
        best, report = self._prove(incumbents, searches)
        candidates = self._candidates(best, incumbents)
        return SearchOutcome(
            best=candidates[0],
            candidates=tuple(candidates),
            rule_of_thumb=None,
            rejections=tuple(self._rejections),
            solver=report,
        )

    def _bounded(self, legal: list[Configuration]) -> list[ConfigurationSearch]:
        """Price every configuration; lowest bound first."""
        found = [search for configuration in legal for search in self.searches(configuration)]
        priced = {id(search.configuration) for search in found}
        for configuration in legal:
            if id(configuration) not in priced:
                self._rejections.append(
                    Rejection(
                        degrees=configuration.degrees,
                        rule="nothing to split",
                        detail=f"no module of the model can be split over tp "
                        f"{configuration.degrees.tp}",
                        schedule=configuration.schedule,
                        microbatch_size=configuration.microbatch_size,
                    )
                )
        return sorted(found, key=lambda search: search.bound_s)

    def _partition(self, search: ConfigurationSearch, incumbents: "_Incumbents") -> None:
        """Cut a configuration with one stage per rank, unless it cannot be among the best."""
        if search.bound_s >= incumbents.limit_s:
            self._refuse_slower(search)
            return
        partition = search.best_partition()
        if partition is None:
            search.bound_s = float("inf")
            self._refuse_memory(search)
            return
        incumbents.add(
            _Solved(search=search, columns=partition.columns, objective_s=partition.objective_s)
        )

    def _interleave(self, search: ConfigurationSearch, incumbents: "_Incumbents") -> None:
        """Cut a configuration with several stages per rank by its own ILP.

        Only where it may be the best layout or the runner-up: these ILPs are the dearest.
        """
        limit_s = incumbents.nth_s(2)
        if search.bound_s >= limit_s:
            self._refuse_slower(search)
            return
        problem = search.problem(limit_s)
        scale_s = limit_s if limit_s < float("inf") else search.bound_s
        try:
            if problem is None:
                raise SolverError("no columns")
            solution = solve_stages(
                [problem],
                scale_s=scale_s,
                time_limit_s=self._request.time_limit_s,
                cutoff_s=limit_s if limit_s < float("inf") else None,
            )
        except SolverError:
            search.bound_s = max(search.bound_s, limit_s)
            self._refuse_slower(search)
            return
        search.bound_s = max(search.bound_s, solution.bound_s)
        incumbents.add(
            _Solved(search=search, columns=solution.columns, objective_s=solution.objective_s)
        )

    def _refuse_slower(self, search: ConfigurationSearch) -> None:
        configuration = search.configuration
        self._rejections.append(
            Rejection(
                degrees=configuration.degrees,
                rule="slower",
                detail=f"cannot be faster than {search.bound_s:.4g} s, behind those shown",
                schedule=configuration.schedule,
                microbatch_size=configuration.microbatch_size,
            )
        )

    def _prove(
        self, incumbents: "_Incumbents", searches: list[ConfigurationSearch]
    ) -> tuple[_Solved, SolverReport]:
        """Solve the joint ILP over all configurations whose bound beats the incumbent."""
        incumbent = incumbents.ranked()[0]
        limit_s = incumbent.objective_s
        open_searches = [search for search in searches if search.bound_s < limit_s]
        problems: dict[int, tuple[StageProblem, ConfigurationSearch]] = {}
        for search in open_searches:
            problem = search.problem(limit_s)
            if problem is not None:
                problems[id(problem)] = (problem, search)
        if not problems:
            return incumbent, SolverReport(status="optimal", objective_s=limit_s, bound_s=limit_s)
        solution = solve_stages(
            [problem for problem, _ in problems.values()],
            scale_s=limit_s,
            time_limit_s=self._request.time_limit_s,
        )
        best = incumbent
        if solution.objective_s < limit_s:
            search = problems[id(solution.problem)][1]
            best = _Solved(
                search=search, columns=solution.columns, objective_s=solution.objective_s
            )
        return best, SolverReport(
            status=solution.status,
            objective_s=best.objective_s,
            bound_s=min(solution.bound_s, best.objective_s),
        )

    def _candidates(self, best: _Solved, incumbents: "_Incumbents") -> list[Plan]:
        """The best plan, then every other priced configuration, fastest first."""
        plans = [decode_plan(best.search, best.columns, self._context)]
        seen = {best.search.configuration}
        for other in incumbents.ranked():
            if other.search.configuration not in seen:
                seen.add(other.search.configuration)
                plans.append(decode_plan(other.search, other.columns, self._context))
        return plans

    def _nothing_legal(self) -> RequestError:
        rules: dict[str, str] = {}
        for rejection in self._rejections:
            rules.setdefault(rejection.rule, rejection.detail)
        return RequestError(
            f"no layout of {self._cluster.num_gpus} GPUs is legal for this model and a global "
            f"batch of {self._request.global_batch_size}: " + "; ".join(rules.values()),
            hint="change the number of GPUs or the global batch size, or fix fewer values",
        )

    def _nothing_fits(self, kept: list[ConfigurationSearch]) -> InfeasiblePlanError:
        return InfeasiblePlanError("nothing fits")
