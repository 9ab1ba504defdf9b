"""The search: from a traced model and a cluster to the best plan, with its proof.

Configurations are taken in the order of a cheap lower bound. Each gets a partition (an
incumbent) and a sharper bound; the joint ILP then decides among those whose bound is below the
best incumbent, and its result cannot be beaten by the others.
"""

import time

from planner.errors import InfeasiblePlanError, RequestError, SolverError
from planner.graph.sizes.family import GraphFamily
from planner.hardware.spec import ClusterSpec
from planner.plan.record import OpRow
from planner.plan.types import Plan, Rejection, SearchOutcome, SolverReport
from planner.search.configuration_search import ConfigurationSearch
from planner.search.decode import decode_plan
from planner.search.incumbents import Incumbents, Solved
from planner.search.infeasible import Resize, nothing_fits, smallest
from planner.search.op_rows import op_rows
from planner.search.rule_of_thumb import rule_of_thumb
from planner.search.solver import NoSolutionError
from planner.search.space import LayoutSpace, SearchRequest, memory_refusal, refusal
from planner.search.stage_ilp import StageProblem, StageSolution, solve_stages
from planner.strategy.configuration import Configuration

_LEAST_SOLVER_S = 1.0
"""Time that the solver gets in any case: enough for most instances."""


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
        self._space = LayoutSpace(graphs, cluster, request)
        self._request = request
        self._cluster = cluster
        self._resize = resize
        self._rejections: list[Rejection] = []
        self._deadline_s = float("inf")

    @property
    def _remaining_s(self) -> float:
        """Time left to the solver; what is not decided by then keeps its bound."""
        return self._deadline_s - time.monotonic()

    def op_rows(self, plan: Plan) -> tuple[OpRow, ...]:
        """Every forward op of a plan of this search with its price on one rank."""
        return op_rows(plan, self._space.pricer)

    def run(self) -> SearchOutcome:
        """Find the best plan and prove it.

        Raises:
            RequestError: The model's shapes allow no layout.
            InfeasiblePlanError: No layout fits the memory.
            SolverError: The solver found nothing within the limit.
        """
        self._deadline_s = time.monotonic() + self._request.time_limit_s
        legal, self._rejections = self._space.legal()
        if not legal:
            raise self._nothing_legal()
        if not self._space.state_fits():
            # No need to price them all to know that nothing fits, only the smallest.
            legal = smallest(legal)
        searches = self._bounded(legal)
        if not searches:
            raise self._nothing_legal()
        incumbents = Incumbents(self._request.top)
        for search in searches:
            if search.configuration.virtual_stages == 1:
                self._partition(search, incumbents)
        for search in searches:
            if search.configuration.virtual_stages > 1 and (
                self._remaining_s > 0 or not incumbents.solved
            ):
                self._interleave(search, incumbents)
        if not incumbents.solved:
            raise self._nothing_fits(searches)
        best, report = self._prove(incumbents, searches)
        candidates = self._candidates(best, incumbents)
        return SearchOutcome(
            best=candidates[0],
            candidates=tuple(candidates),
            rule_of_thumb=rule_of_thumb(self._space),
            rejections=tuple(self._rejections),
            solver=report,
        )

    def _bounded(self, legal: list[Configuration]) -> list[ConfigurationSearch]:
        """Price every configuration; lowest bound first."""
        found = [
            search for configuration in legal for search in self._space.searches(configuration)
        ]
        priced = {id(search.configuration) for search in found}
        for configuration in legal:
            if id(configuration) not in priced:
                self._rejections.append(
                    refusal(
                        configuration,
                        rule="nothing to split",
                        detail="no module of the model can be split over tp "
                        f"{configuration.degrees.tp}",
                    )
                )
        return sorted(found, key=lambda search: search.bound_s)

    def _partition(self, search: ConfigurationSearch, incumbents: Incumbents) -> None:
        """Cut a configuration with one stage per rank, unless it cannot be among the best."""
        if search.bound_s >= incumbents.limit_s:
            self._refuse_slower(search)
            return
        partition = search.best_partition()
        if partition is None:
            search.bound_s = float("inf")
            self._rejections.append(memory_refusal(search))
            return
        incumbents.add(
            Solved(search=search, columns=partition.columns, objective_s=partition.objective_s)
        )

    def _interleave(self, search: ConfigurationSearch, incumbents: Incumbents) -> None:
        """Cut a configuration with several stages per rank by its own ILP.

        Only where it may be the best layout or the runner-up: these ILPs are the dearest.
        """
        limit_s = incumbents.nth_s(2)
        if search.bound_s >= limit_s:
            self._refuse_slower(search)
            return
        problem = search.problem(limit_s)
        try:
            if problem is None:
                raise NoSolutionError("no columns")
            solution = self._solve([problem], limit_s, search.bound_s)
        except NoSolutionError:
            if limit_s == float("inf"):
                self._rejections.append(memory_refusal(search))
            else:
                self._refuse_slower(search)
            search.bound_s = max(search.bound_s, limit_s)
            return
        except SolverError:
            return  # out of time: its bound stays, and the joint ILP decides
        search.bound_s = max(search.bound_s, solution.bound_s)
        incumbents.add(
            Solved(search=search, columns=solution.columns, objective_s=solution.objective_s)
        )

    def _solve(self, problems: list[StageProblem], limit_s: float, bound_s: float) -> StageSolution:
        """Solve the stage ILP below a limit, which may be endless."""
        known = limit_s < float("inf")
        return solve_stages(
            problems,
            scale_s=limit_s if known else bound_s,
            time_limit_s=max(_LEAST_SOLVER_S, self._remaining_s),
            cutoff_s=limit_s if known else None,
        )

    def _refuse_slower(self, search: ConfigurationSearch) -> None:
        self._rejections.append(
            refusal(
                search.configuration,
                rule="slower",
                detail=f"cannot be faster than {search.bound_s:.4g} s, behind the layouts shown",
            )
        )

    def _prove(
        self, incumbents: Incumbents, searches: list[ConfigurationSearch]
    ) -> tuple[Solved, SolverReport]:
        """Solve the joint ILP over all configurations whose bound beats the incumbent."""
        incumbent = incumbents.ranked()[0]
        limit_s = incumbent.objective_s
        open_searches = [search for search in searches if search.bound_s < limit_s]
        problems: dict[int, tuple[StageProblem, ConfigurationSearch]] = {}
        for search in open_searches:
            problem = search.problem(limit_s)
            if problem is not None:
                problems[id(problem)] = (problem, search)
        proven = SolverReport(status="optimal", objective_s=limit_s, bound_s=limit_s)
        least_s = min((search.bound_s for search in open_searches), default=limit_s)
        try:
            if not problems:
                return incumbent, proven
            solution = self._solve([problem for problem, _ in problems.values()], limit_s, least_s)
        except NoSolutionError:
            return incumbent, proven
        except SolverError:
            return incumbent, SolverReport(
                status="time limit", objective_s=limit_s, bound_s=least_s
            )
        best = incumbent
        if solution.objective_s < limit_s:
            search = problems[id(solution.problem)][1]
            best = Solved(search=search, columns=solution.columns, objective_s=solution.objective_s)
        return best, SolverReport(
            status=solution.status,
            objective_s=best.objective_s,
            bound_s=min(solution.bound_s, best.objective_s),
        )

    def _candidates(self, best: Solved, incumbents: Incumbents) -> list[Plan]:
        """The best plan, then every other priced configuration, fastest first."""
        plans = [decode_plan(best.search, best.columns, self._space.context)]
        seen = {best.search.configuration}
        for other in incumbents.ranked():
            if other.search.configuration not in seen:
                seen.add(other.search.configuration)
                plans.append(decode_plan(other.search, other.columns, self._space.context))
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

    def _nothing_fits(self, searches: list[ConfigurationSearch]) -> InfeasiblePlanError:
        return nothing_fits(self._space, searches, self._resize)
