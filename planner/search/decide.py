"""The decision among configurations: bounds, first choices, and the programs' last word.

Every configuration has a lower bound on its step, and where it may still be the best it gets a
choice of stages, which is priced by its action list (``visits``). Those whose bound is below the
best step are then decided, lowest bound first. Ranks of several stages are relaxed to fractions
(``stage_relaxation``), and what is still open is enumerated where there is not too much of it
(``combination``), or split (``stage_branching``), with the paths that the relaxations took. Where
runs of units are unlike, and while no step is known, a joint ILP of a batch at a time decides.
Their result is no slower than any other choice of theirs, and the other configurations cannot be
faster.

Bounds hold for any choice of stages in the searched set (``bounds``, ``partition``,
``interleaving`` say what they take for granted). Limits count work, so that a busy machine finds
the same plan; seconds count where the user sets them.
"""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from planner.plan.types import SolverReport
from planner.search.columns import Decided
from planner.search.combination import best_combination
from planner.search.configuration_search import ConfigurationSearch
from planner.search.first_choices import FirstChoices
from planner.search.incumbents import Incumbents
from planner.search.refusals import left_out
from planner.search.relaxation import Relaxation
from planner.search.stage_branching import branched
from planner.search.stage_ilp import TOLERANCE, StageProblem, solve_stages
from planner.search.stage_problem import TooManyRunsError, stage_problem
from planner.search.stage_relaxation import relaxed
from planner.search.visits import Bounded, LowestFirst, Visits
from planner.solver import Effort, NoneFoundError, NoSolutionError
from planner.strategy.configuration import Configuration

_MOST_COLUMNS = 100
"""Columns of one joint program, but for a single configuration that has more."""
_HARD = Effort(most_checks=3_000)
"""Of a program that was left open once, if it has no more columns than ``_MOST_HARD``."""
_MOST_HARD = 400
_MOST_PROGRAMS = 400
"""Joint programs of one search."""
_MOST_OPEN = 8
"""Configurations that joint programs may leave open before the rest stays so: a gap is there
already."""
_NEWS = 0.005
"""Share by which the best step must fall for a configuration to be relaxed again."""
_NEAR = 1e-5
"""Share by which recomputations that are near enough may be off for a plan to be optimal."""
_MOST_MOVES = 40
"""Moves of single units that may help one configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What is known of an open configuration."""

    problem: StageProblem
    """Its choices in steps below the limit."""
    limit_s: float


class Decision:
    """The best choice of stages among some configurations."""

    def __init__(
        self,
        searches: Sequence[Bounded],
        *,
        top: int,
        time_limit_s: float | None,
        others: Callable[[ConfigurationSearch], Iterable[ConfigurationSearch]] = lambda _: (),
        has_orders: Callable[[Configuration], bool] = lambda _: False,
    ) -> None:
        """Set up.

        Args:
            searches: Configurations with their prices, or how to price them.
            top: Layouts that the user wants to see.
            time_limit_s: Time after which no more is proven, None for a limit of work.
            others: The same configuration in other orders of the mesh.
            has_orders: Whether there are some.
        """
        self.incumbents = Incumbents(top)
        """What was found."""
        self.visits = Visits(self.incumbents, others=others, has_orders=has_orders)
        """What was looked at."""
        self._begins_with = searches
        self._time_limit_s = time_limit_s
        self._deadline_s = inf
        self._most_open = _MOST_OPEN if time_limit_s is None else sys.maxsize
        self._problems: dict[int, _Known] = {}
        self._too_many: set[tuple[int, float]] = set()
        self._left_open: set[int] = set()
        self._given_up: set[int] = set()

    def decide(self) -> SolverReport:
        """Find the best choice and prove it; ``incumbents`` holds it, and is empty if none fits."""
        self.visits.look_at(self._begins_with)
        self.visits.look_at_orders()
        if self._time_limit_s is not None:
            self._deadline_s = time.monotonic() + self._time_limit_s
        report = self._prove()
        while self.visits.look_at_orders():  # of what came near to the best by a proof alone
            report = self._prove()
        return report

    def _prove(self) -> SolverReport:
        """Decide among all configurations whose bound is below the best step.

        Configurations of which nothing is known to fit, and nothing to be slower, are open too.
        """
        self._decide_batches(Effort(), self._most_open)
        if self._time_limit_s is None and not self._has_given_up:
            open_before, self._left_open = self._left_open, set()
            self._decide_batches(_HARD, 1)
            self._left_open |= open_before
        best_s = self.incumbents.nth_s(1)
        bound_s = min([best_s, *(each.bound_s for each in self.visits.bounded)])
        ended = "time limit" if self._time_limit_s is not None else "work limit"
        near_s = (each.bound_s * (1 - each.share_off) for each in self.visits.searches)
        least_s = min([bound_s, *near_s])
        proven = best_s <= bound_s * (1 + TOLERANCE) and best_s <= least_s * (1 + _NEAR)
        return SolverReport(
            status="optimal" if proven else ended,
            objective_s=best_s,
            bound_s=least_s,
            limits=left_out(self.visits.searches, best_s),
        )

    @property
    def _has_given_up(self) -> bool:
        """Whether one stays open anyway: the lowest bound is that of all."""
        best_s = self.incumbents.nth_s(1)
        given_up = (each for each in self.visits.searches if id(each) in self._given_up)
        return any(each.bound_s < best_s * (1 - TOLERANCE) for each in given_up)

    def _decide_batches(self, effort: Effort, most_open: int) -> None:
        """Decide program after program, until so many configurations are left open."""
        for _ in range(_MOST_PROGRAMS):
            batch = self._batch()
            is_enough = len(self._left_open) >= most_open or time.monotonic() > self._deadline_s
            if not batch or is_enough:
                break
            if not self._decide(batch, self.incumbents.nth_s(1), effort):
                columns = sum(problem.num_columns for _, problem in batch)
                left = {id(search) for search, _ in batch}
                self._left_open |= left
                self._given_up |= left if effort is _HARD or columns > _MOST_HARD else set()

    def _batch(self) -> list[tuple[ConfigurationSearch, StageProblem]]:
        """The open configurations with the lowest bounds, as many as one program takes."""
        batch: list[tuple[ConfigurationSearch, StageProblem]] = []
        columns = 0
        queue = LowestFirst(
            search for search in self.visits.searches if id(search) not in self._left_open
        )
        for search in queue:
            best_s = self.incumbents.nth_s(1)
            is_decided = search.bound_s >= best_s * (1 - TOLERANCE)
            if is_decided or search.bound_s == inf or time.monotonic() > self._deadline_s:
                break
            if self._is_news(search, best_s):
                self._relax(search, best_s)
                queue.add([search] if id(search) not in self._left_open else [])
                continue
            problem = self._problems[id(search)].problem
            is_decided = problem.by_rank and self._combine(search, problem, best_s)
            if isinstance(search, Relaxation):
                if search.bound_s < best_s * (1 - TOLERANCE):
                    queue.add(self.visits.members(search))
                continue
            if is_decided:
                continue
            columns += problem.num_columns
            is_full = problem.is_counted or columns > _MOST_COLUMNS
            if not batch or not is_full:
                batch.append((search, problem))
            if is_full:
                break
        return batch

    def _is_news(self, search: ConfigurationSearch, best_s: float) -> bool:
        """Whether a configuration was never relaxed, or for much slower steps."""
        known = self._problems.get(id(search))
        return known is None or best_s < known.limit_s * (1 - _NEWS)

    def _relax(self, search: ConfigurationSearch, best_s: float) -> None:
        """Bound an open configuration without integers, and look for better choices of it."""
        known = self._problems.get(id(search))
        try:
            problem = stage_problem(search, best_s)
        except TooManyRunsError:
            self._left_open.add(id(search))
            self._given_up.add(id(search))
            return
        if problem is None:
            search.bound_s = best_s
            return
        problem = replace(problem, paths=() if known is None else known.problem.paths)
        if search.shares_ranks and best_s < inf:
            found = relaxed(problem, best_s)
            problem = replace(problem, paths=found.paths)
            search.bound_s = max(search.bound_s, min(found.bound_s, best_s))
        self._problems[id(search)] = _Known(problem=problem, limit_s=best_s)
        if known is None and search.shares_ranks and search.bound_s < best_s * (1 - TOLERANCE):
            self._improve(search)

    def _improve(self, search: ConfigurationSearch) -> None:
        """Look for better choices of a configuration that may be the best."""
        choices = FirstChoices(search)
        first = choices.first()
        if first is not None:
            self.visits.take(search, choices.better(first, moves=_MOST_MOVES))

    def _combine(self, search: ConfigurationSearch, problem: StageProblem, best_s: float) -> bool:
        """Decide a configuration by enumeration; False where that would be too much work."""
        known = id(search), best_s
        if known in self._too_many:
            return False
        found = best_combination(search, problem.choices, best_s, problem.paths)
        if found is None:
            self._too_many.add(known)
            return False
        self._learn(search, found)
        return True

    def _learn(self, search: ConfigurationSearch, found: Decided) -> None:
        """Note what was proven of a configuration."""
        if found.partition is not None:
            self.visits.take(search, found.partition)
        search.bound_s = max(search.bound_s, found.bound_s)

    def _decide(
        self,
        batch: list[tuple[ConfigurationSearch, StageProblem]],
        best_s: float,
        effort: Effort,
    ) -> bool:
        """Decide a batch by branching, or by its joint ILP; False where limits left it open."""
        if self._time_limit_s is not None:
            effort = Effort(most_checks=10**9, deadline_s=self._deadline_s)
        search, problem = batch[0]
        known = best_s < inf
        if known and problem.is_counted:
            self._learn(search, branched(problem, best_s, fits=search.all_fit, effort=effort))
            return search.bound_s >= self.incumbents.nth_s(1) * (1 - TOLERANCE)
        search_of = {id(problem): search for search, problem in batch}
        try:
            solution = solve_stages(
                [problem for _, problem in batch],
                scale_s=best_s if known else batch[0][0].bound_s,
                effort=effort,
                cutoff_s=best_s if known else None,
                fits=lambda problem, columns: search_of[id(problem)].all_fit(columns),
            )
        except NoSolutionError:
            bound_s, is_decided = best_s, True
        except NoneFoundError as error:
            bound_s, is_decided = error.bound, False
        else:
            self.visits.take(search_of[id(solution.problem)], solution)
            bound_s, is_decided = solution.bound_s, solution.status == "optimal"
        for search, _ in batch:
            search.bound_s = max(search.bound_s, bound_s)
        return is_decided
