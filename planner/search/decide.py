"""The decision among configurations: bounds, first choices, and the joint ILP's last word.

Every configuration has a lower bound on its step, and where it may still be the best it gets a
choice of stages, which is priced by its action list. Those whose bound is below the best step are
then decided, lowest bound first: by enumeration where ranks of several stages allow it
(``combination``), and by a joint ILP of a batch at a time elsewhere. Their result is no slower than
any other choice of theirs, and the other configurations cannot be faster.

Bounds hold for any choice of stages in the searched set (``bounds``, ``partition``,
``interleaving`` say what they take for granted). Limits count work, so that a busy machine finds
the same plan; seconds count where the user sets them.
"""

import time
from collections.abc import Sequence

from planner.plan.types import Rejection, SolverReport
from planner.search.columns import Column
from planner.search.combination import best_combination
from planner.search.configuration_search import REACH_UNITS, ConfigurationSearch, Partition
from planner.search.incumbents import Incumbents, Solved
from planner.search.interleaving import even_interleaving, sharpen
from planner.search.partition import best_partition
from planner.search.refusals import memory_refusal, refusal
from planner.search.stage_ilp import (
    TOLERANCE,
    Effort,
    StageProblem,
    StageSolution,
    solve_stages,
)
from planner.search.stage_problem import stage_problem
from planner.solver import NoneFoundError, NoSolutionError

_MOST_COLUMNS = 100
"""Columns of one joint program, but for a single configuration that has more."""
_MOST_PROGRAMS = 400
"""Joint programs of one search."""
_LEAST_SOLVER_S = 1.0
"""Time that the solver gets in any case: enough for most instances."""


class Decision:
    """The best choice of stages among some configurations."""

    def __init__(
        self, searches: Sequence[ConfigurationSearch], *, top: int, time_limit_s: float | None
    ) -> None:
        """Set up.

        Args:
            searches: Configurations with their prices.
            top: Layouts that the user wants to see.
            time_limit_s: Time after which no more is proven, None for a limit of work.
        """
        self._searches = sorted(searches, key=lambda search: search.bound_s)
        self._time_limit_s = time_limit_s
        self._deadline_s = float("inf") if time_limit_s is None else time.monotonic() + time_limit_s
        self.incumbents = Incumbents(top)
        """What was found."""
        self.rejections: list[Rejection] = []
        """What was refused, and why."""

    def decide(self) -> SolverReport:
        """Find the best choice and prove it; ``incumbents`` holds it, and is empty if none fits."""
        for search in self._searches:
            if not search.shares_ranks:
                self._partition(search)
        for search in self._searches:
            if search.shares_ranks:
                self._interleave(search)
        return self._prove()

    def _partition(self, search: ConfigurationSearch) -> None:
        """Cut a configuration with one stage per rank, unless it cannot be among the best."""
        limit_s = self.incumbents.limit_s
        if search.bound_s >= limit_s:
            self._refuse_slower(search)
            return
        partition = best_partition(search, limit_s)
        if partition is not None:
            self._take(search, partition)
        elif search.fits_somehow():
            self._refuse_slower(search)
        else:
            search.bound_s = float("inf")
            self.rejections.append(memory_refusal(search))

    def _interleave(self, search: ConfigurationSearch) -> None:
        """Give a configuration with several stages per rank a bound and a first choice."""
        if search.bound_s < self.incumbents.limit_s:
            sharpen(search)
        if search.bound_s == float("inf"):
            self.rejections.append(memory_refusal(search))
            return
        if search.bound_s >= self.incumbents.limit_s:
            self._refuse_slower(search)
            return
        partition = even_interleaving(search)
        if partition is not None:
            self._take(search, partition)

    def _take(self, search: ConfigurationSearch, found: Partition | StageSolution) -> None:
        self.incumbents.add(
            Solved(search=search, columns=found.columns, objective_s=found.objective_s)
        )

    def _refuse_slower(self, search: ConfigurationSearch) -> None:
        self.rejections.append(
            refusal(
                search.configuration,
                rule="slower",
                detail=f"cannot be faster than {search.bound_s:.4g} s, behind the layouts shown",
            )
        )

    def _prove(self) -> SolverReport:
        """Decide among all configurations whose bound is below the best step.

        Configurations of which nothing is known to fit, and nothing to be slower, are open too.
        """
        left_open: set[int] = set()
        for program in range(_MOST_PROGRAMS + 1):
            best_s = self.incumbents.nth_s(1)
            batch = self._batch(best_s, left_open)
            if not batch:
                break
            best_s = self.incumbents.nth_s(1)
            if program == _MOST_PROGRAMS or time.monotonic() > self._deadline_s:
                break
            if not self._decide(batch, best_s):
                left_open |= {id(search) for search, _ in batch}
        best_s = self.incumbents.nth_s(1)
        bound_s = min([best_s, *(search.bound_s for search in self._searches)])
        ended = "time limit" if self._time_limit_s is not None else "work limit"
        proven = best_s <= bound_s * (1 + TOLERANCE)
        return SolverReport(
            status="optimal" if proven else ended,
            objective_s=best_s,
            bound_s=bound_s,
            limits=self._limits(),
        )

    def _batch(
        self, best_s: float, left_open: set[int]
    ) -> list[tuple[ConfigurationSearch, StageProblem]]:
        """The open configurations with the lowest bounds, as many as one program takes."""
        batch: list[tuple[ConfigurationSearch, StageProblem]] = []
        columns = 0
        for search in sorted(self._searches, key=lambda search: search.bound_s):
            if search.bound_s >= best_s * (1 - TOLERANCE) or search.bound_s == float("inf"):
                break
            if id(search) in left_open:
                continue
            problem = stage_problem(search, best_s)
            if problem is None:
                search.bound_s = best_s
                continue
            if problem.by_rank and self._combine(search, problem, best_s):
                best_s = self.incumbents.nth_s(1)
                continue
            columns += problem.num_columns
            if batch and columns > _MOST_COLUMNS:
                break
            batch.append((search, problem))
        return batch

    def _combine(self, search: ConfigurationSearch, problem: StageProblem, best_s: float) -> bool:
        """Decide a configuration by enumeration; False where that would be too much work."""
        found = best_combination(search, problem.choices, best_s)
        if found is None:
            return False
        if found.partition is not None:
            self._take(search, found.partition)
        search.bound_s = max(search.bound_s, found.bound_s)
        return True

    def _decide(
        self,
        batch: list[tuple[ConfigurationSearch, StageProblem]],
        best_s: float,
    ) -> bool:
        """Solve the joint ILP of a batch; False where its limits left it open."""
        known = best_s < float("inf")
        search_of = {id(problem): search for search, problem in batch}
        try:
            solution = solve_stages(
                [problem for _, problem in batch],
                scale_s=best_s if known else batch[0][0].bound_s,
                effort=self._effort(),
                cutoff_s=best_s if known else None,
                fits=lambda problem, columns: _fits(search_of[id(problem)], columns),
            )
        except NoSolutionError:
            for search, _ in batch:
                if not known:
                    self.rejections.append(memory_refusal(search))
                search.bound_s = best_s
            return True
        except NoneFoundError as error:
            for search, _ in batch:
                search.bound_s = max(search.bound_s, error.bound)
            return False
        self._take(search_of[id(solution.problem)], solution)
        for search, _ in batch:
            search.bound_s = max(search.bound_s, solution.bound_s)
        return solution.status == "optimal"

    def _effort(self) -> Effort:
        if self._time_limit_s is None:
            return Effort()
        left_s = self._deadline_s - time.monotonic()
        return Effort(most_checks=10**9, time_limit_s=max(_LEAST_SOLVER_S, left_s))

    def _limits(self) -> tuple[str, ...]:
        """What the searched set leaves out, as far as it matters here."""
        if not any(search.shares_ranks for search in self._searches):
            return ()
        return (
            f"interleaved stages within {REACH_UNITS} unit of their even share, blocks of a stage "
            "recomputed alike, a power of two of them on a rank",
        )


def _fits(search: ConfigurationSearch, columns: Sequence[Column]) -> bool:
    """Whether every rank can hold its stages, exactly."""
    pp = search.configuration.degrees.pp
    return not search.shares_ranks or all(
        search.fits(rank, columns[rank::pp]) for rank in range(pp)
    )
