"""Second ILP: which configuration, and where its stages are cut.

Sets
    c in C           configurations (degrees, schedule, microbatch, ZeRO form, stream)
    s in S(c)        stages of a configuration in model order; stage s lies on rank r(s)
    j in J(c,s)      columns: a run of units [first, end) with a recomputation. Where what a rank
                     can hold is listed, j is one of these for all stages of the rank alike
    k in K(c)        paths through the action list of the schedule: how often each takes the
                     forward (n[k,s]) and the backward (o[k,s]) of each stage

Variables
    u[c]             1 where configuration c is chosen
    x[c,s,j]         1 where stage s of configuration c is column j
    F[c,s], B[c,s]   seconds of one microbatch's forward and backward in a stage; where backwards
                     are divided, B is the inputs' part, and the weights' part a variable like it
    W                seconds of all microbatches
    D                seconds once per step: exposed gradient and parameter traffic, optimiser

Objective
    W + D

    An action list takes as long as its longest path, so that W is at least every path's time.
    Three paths of each rank are there from the start (``planner.search.bounds``). Where the action
    list of a solution takes longer than its W, its longest path joins K and the program is solved
    again: a cutting plane. When none is longer, the solution is best by the action list itself,
    and at every round the optimum is a lower bound on it.

Constraints
    one configuration    sum_c u[c] = 1                                            ``_choose``
    one column a stage   sum_j x[c,s,j] = u[c]                                     ``_choose``
    stage times          F[c,s] = sum_j f x[c,s,j],  B[c,s] = sum_j b x[c,s,j]     ``_stage_times``
    contiguity           columns of s that end at b = columns of s + 1 that start
                         at b, for every b; the first starts at 0, the last ends
                         at the end (no other columns are made)                    ``_join``
                         where inner runs are alike, a column stands for all runs
                         of its length, and the lengths add up to the model:
                         sum_s,j length x[c,s,j] = units u[c]                      ``_add_up``
    paths                W >= sum_s n[k,s] F[c,s] + o[k,s] B[c,s], for every c, k  ``add_path``
    once per step        D >= sum_{s on r} sum_j d x, for every c, r               ``_once_rows``
    cutoff               the objective is at most the best step that is known      ``cut_off``
    memory               sum_{s on r} sum_j held x <= capacity, for every one of
                         the schedule's fullest moments; held has the highest
                         transient of the stage that runs then                     ``_memory``
                         sum_{s on r} sum_j reduction x <= capacity                ``_memory``
    no repetition        a choice that the solver's tolerance let exceed the
                         memory is excluded: sum of its x <= stages - 1            ``exclude``

With one stage per rank, or ranks whose choices are listed, those that do not fit are not made,
and no memory row is needed.
Written with integer layer counts per stage and kind instead, instances of 126 layers on 16
stages took minutes; as columns they take milliseconds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from planner.cost.pipeline import Path
from planner.cost.shared_cores import path_of
from planner.errors import SolverError
from planner.search.bounds import bounding_paths
from planner.search.columns import Column, Holding, placed, step_time_s
from planner.solver import Effort, Minimisation, NoneFoundError, NoSolutionError, Term, is_chosen
from planner.strategy.configuration import Configuration

_SCALED_OBJECTIVE = 1000.0
"""Seconds are scaled so that the incumbent is this: tolerances are absolute."""
TOLERANCE = 1e-7
"""Steps of this relative difference are the same."""
_MOST_ROUNDS = 20
"""Paths that may join a program before it ends with a gap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProblem:
    """One configuration with its columns."""

    configuration: Configuration
    """What the columns were priced for."""
    choices: tuple[tuple[Holding, ...], ...]
    """What can be chosen for each stage in model order: one column. Or for each rank: the columns
    of all its stages."""
    room_bytes: float | None
    """Memory of a rank less the reserve, where stages that are chosen apart compete for it; else
    None."""
    num_units: int | None
    """Units of the model where a column stands for all runs of its length; else None."""
    paths: tuple[Path, ...] = ()
    """Paths of the action list that are known to matter, beside ``bounding_paths``."""

    @property
    def by_rank(self) -> bool:
        """Whether the stages of a rank are chosen together."""
        return len(self.choices) < self.configuration.num_stages

    @property
    def is_counted(self) -> bool:
        """Whether a column stands for all runs of its length."""
        return self.num_units is not None

    @property
    def num_columns(self) -> int:
        """Binary variables of the program."""
        return sum(len(choices) for choices in self.choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSolution:
    """The chosen configuration and its stages."""

    problem: StageProblem
    """The configuration."""
    columns: tuple[Column, ...]
    """One per stage."""
    objective_s: float
    """Step time by the action list."""
    bound_s: float
    """No choice among the given columns is faster."""
    status: str
    """"optimal" or "limit"."""


Fits = Callable[[StageProblem, Sequence[Column]], bool]
"""Whether a choice fits the memory exactly."""


def solve_stages(
    problems: Sequence[StageProblem],
    *,
    scale_s: float,
    effort: Effort,
    cutoff_s: float | None = None,
    fits: Fits | None = None,
) -> StageSolution:
    """Choose among configurations and cuts.

    Args:
        problems: Configurations with their columns.
        scale_s: A step time of the right size (the incumbent's).
        effort: Limits of the solver.
        cutoff_s: Step time that a choice must not exceed.
        fits: The exact check of memory where ranks hold several stages; None for no check.

    Raises:
        NoSolutionError: No choice exists below the cutoff.
        NoneFoundError: None was found within the limits; ``bound`` is in seconds.
    """
    model = _Model(problems, _SCALED_OBJECTIVE / scale_s)
    if cutoff_s is not None:
        model.cut_off(cutoff_s)
    best: StageSolution | None = None
    bound_s = 0.0
    for _ in range(_MOST_ROUNDS):
        try:
            found = model.solve(effort)
        except (NoSolutionError, NoneFoundError) as error:
            if best is None:
                raise
            return _ended(best, error, cutoff_s)
        bound_s = max(bound_s, found.bound_s)
        if fits is not None and not fits(found.problem, found.columns):
            if effort.is_over:
                break
            model.exclude()
            continue
        best = found if best is None or found.objective_s < best.objective_s else best
        if found.status == "optimal" and best.objective_s <= bound_s * (1 + TOLERANCE):
            return _proven(best, bound_s, "optimal")
        if found.status != "optimal" or effort.is_over:
            return _proven(best, bound_s, "limit")
        model.add_longest_path(found)
    if best is None:
        # Those that are excluded do not fit; of the others nothing is proven but the bound.
        words = "no choice that fits the memory was found"
        raise NoneFoundError(words, hint="allow more time", bound=bound_s)
    return _proven(best, bound_s, "limit")


def _ended(best: StageSolution, error: SolverError, cutoff_s: float | None) -> StageSolution:
    """The best choice where a later round found none: below the cutoff, or within its limits."""
    if isinstance(error, NoneFoundError):
        return _proven(best, error.bound, "limit")
    return _proven(best, best.objective_s if cutoff_s is None else cutoff_s, "optimal")


def _proven(best: StageSolution, bound_s: float, status: str) -> StageSolution:
    return StageSolution(
        problem=best.problem,
        columns=best.columns,
        objective_s=best.objective_s,
        bound_s=min(bound_s, best.objective_s),
        status=status,
    )


class _Model:
    """Variables and rows of one instance; times are multiplied by ``scale``."""

    def __init__(self, problems: Sequence[StageProblem], scale: float) -> None:
        self._program = Minimisation("stages")
        self._scale = scale
        self._problems = problems
        self._passing: Term = (1.0, self._program.non_negative())
        self._once: Term = (1.0, self._program.non_negative())
        self._program.add_cost([self._passing, self._once])
        self._chosen: list[Term] = [(1.0, self._program.binary()) for _ in problems]
        self._x = [
            [[self._program.binary() for _ in choices] for choices in problem.choices]
            for problem in problems
        ]
        self._choose()
        self._times = [self._stage_times(index, problem) for index, problem in enumerate(problems)]
        for index, problem in enumerate(problems):
            if problem.num_units is None:
                self._join(index, problem)
            else:
                self._add_up(index, problem, problem.num_units)
            for path in (*bounding_paths(problem.configuration), *problem.paths):
                self.add_path(index, path)
            self._once_rows(index, problem)
            if problem.room_bytes is not None:
                self._memory(index, problem, problem.room_bytes)

    def _choose(self) -> None:
        """One configuration, one choice for each of its stages or ranks."""
        self._program.equal(self._chosen, constant=1)
        for chosen, parts in zip(self._chosen, self._x, strict=True):
            for variables in parts:
                self._program.equal([(1.0, x) for x in variables], [chosen])

    def _stage_times(self, index: int, problem: StageProblem) -> list[list[object]]:
        """Forward and backward (or its two parts) of every stage, as its column has them."""
        times = []
        parts = 3 if problem.configuration.divides_backward else 2
        for stage in range(problem.configuration.num_stages):
            pairs = self._columns(index, problem, stage)
            seconds = [self._program.non_negative() for _ in range(parts)]
            for part, total in enumerate(seconds):
                costs = [(self._scale * column.parts_s[part], x) for column, x in pairs]
                self._program.equal(costs, [(1.0, total)])
            times.append(seconds)
        return times

    def _columns(self, index: int, problem: StageProblem, stage: int) -> list[tuple[Column, Any]]:
        """Columns of a stage, each with the variable that chooses it."""
        place, part = 0, stage
        if problem.by_rank:
            configuration = problem.configuration
            place, part = stage // configuration.degrees.pp, configuration.rank_of(stage)
        return [
            (held[place], x)
            for held, x in zip(problem.choices[part], self._x[index][part], strict=True)
        ]

    def _join(self, index: int, problem: StageProblem) -> None:
        """Each stage starts where the one before it ends."""
        for stage in range(problem.configuration.num_stages - 1):
            ends: dict[int, list[Term]] = {}
            starts: dict[int, list[Term]] = {}
            for column, x in self._columns(index, problem, stage):
                ends.setdefault(column.end, []).append((1.0, x))
            for column, x in self._columns(index, problem, stage + 1):
                starts.setdefault(column.first, []).append((1.0, x))
            for cut in {**ends, **starts}:
                self._program.equal(ends.get(cut, []), starts.get(cut, []))

    def _add_up(self, index: int, problem: StageProblem, num_units: int) -> None:
        """The lengths of the stages add up to the model."""
        lengths = [
            (float(sum(column.end - column.first for column in held)), x)
            for choices, variables in zip(problem.choices, self._x[index], strict=True)
            for held, x in zip(choices, variables, strict=True)
        ]
        self._program.equal(lengths, [(float(num_units), self._chosen[index][1])])

    def add_path(self, index: int, path: Path) -> None:
        """All microbatches take as long as the path."""
        self._program.at_most(
            [
                (float(count), total)
                for seconds, counts in zip(
                    self._times[index], zip(*path.counts, strict=True), strict=True
                )
                for total, count in zip(seconds, counts, strict=False)
            ],
            [self._passing],
        )

    def add_longest_path(self, solution: StageSolution) -> None:
        """Add the path that sets the time of a solution's action list."""
        configuration = solution.problem.configuration
        path = path_of(
            configuration,
            forward_s=[column.forward_s for column in solution.columns],
            backward_s=[column.backward_s for column in solution.columns],
            weight_backward_s=[column.weight_s for column in solution.columns],
        )
        index = next(i for i, p in enumerate(self._problems) if p is solution.problem)
        self.add_path(index, path)

    def _once_rows(self, index: int, problem: StageProblem) -> None:
        """The dearest rank ends the step."""
        for rank in range(problem.configuration.degrees.pp):
            costs: dict[Any, float] = {}
            for _, column, x in self._held(index, problem, rank):
                costs[x] = costs.get(x, 0.0) + self._scale * column.step_s
            self._program.at_most([(cost, x) for x, cost in costs.items()], [self._once])

    def cut_off(self, cutoff_s: float) -> None:
        """Only choices whose objective is at most ``cutoff_s``."""
        self._program.at_most(self._program.costs, constant=self._scale * cutoff_s * (1 + 1e-9))

    def _memory(self, index: int, problem: StageProblem, room_bytes: float) -> None:
        """What the stages of a rank hold, in units of the room."""
        configuration = problem.configuration
        for rank in range(configuration.degrees.pp):
            held = self._held(index, problem, rank)
            self._program.at_most(
                [(column.state.reduction_bytes / room_bytes, x) for _, column, x in held],
                constant=1.0,
            )
            pp = configuration.degrees.pp
            for moment in configuration.fullest_moments(rank):
                self._program.at_most(
                    [
                        (column.held_bytes(moment[stage // pp]) / room_bytes, x)
                        for stage, column, x in held
                    ],
                    constant=1.0,
                )

    def _held(self, index: int, problem: StageProblem, rank: int) -> list[tuple[int, Column, Any]]:
        """Stage, column and variable of everything that a rank may hold."""
        configuration = problem.configuration
        return [
            (stage, column, x)
            for stage in configuration.stages_of(rank)
            for column, x in self._columns(index, problem, stage)
        ]

    def solve(self, effort: Effort) -> StageSolution:
        """Minimise; the solution is priced by its action list."""
        try:
            solution = self._program.solve(
                most_checks=effort.most_checks, time_limit_s=effort.left_s
            )
        except NoneFoundError as error:
            error.bound /= self._scale
            raise
        index = self._chosen_index()
        problem = self._problems[index]
        columns = placed(
            [
                next(c for c, x in self._columns(index, problem, stage) if is_chosen(x))
                for stage in range(problem.configuration.num_stages)
            ]
        )
        return StageSolution(
            problem=problem,
            columns=columns,
            objective_s=step_time_s(problem.configuration, columns),
            bound_s=solution.bound / self._scale,
            status=solution.status,
        )

    def exclude(self) -> None:
        """Exclude the choice that was found."""
        variables = [x for part in self._x[self._chosen_index()] for x in part if is_chosen(x)]
        self._program.at_most([(1.0, x) for x in variables], constant=len(variables) - 1)

    def _chosen_index(self) -> int:
        return next(i for i, (_, u) in enumerate(self._chosen) if is_chosen(u))
