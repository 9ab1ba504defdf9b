"""Second ILP: which configuration, and where its stages are cut.

Sets
    c in C           configurations (degrees, schedule, microbatch, ZeRO form, stream)
    s in S(c)        stages of a configuration in model order; stage s lies on rank r(s)
    j in J(c,s)      columns: a run of units [first, end) with a recomputation

Variables
    u[c]             1 where configuration c is chosen
    x[c,s,j]         1 where stage s of configuration c is column j
    W                seconds that the slowest rank adds
    D                seconds once per step: exposed gradient and parameter traffic, optimiser
    M[c,r]           highest transient of rank r, where a rank holds several stages

Objective, with m[c] microbatches and v[c] stages per rank
    sum_c,s,j (1 / v[c]) t[c,s,j] x[c,s,j]  +  W  +  D

    One microbatch passes all stages (fill and drain, shortened v times where stages interleave),
    the other m - 1 / v follow at the pace of the slowest rank (Narayanan et al. 2021,
    2104.04473, section 2.2: bubble (p - 1) / v of a rank's time per microbatch).

Constraints
    one configuration    sum_c u[c] = 1                                            ``_choose``
    one column a stage   sum_j x[c,s,j] = u[c]                                     ``_choose``
    contiguity           columns of s that end at b = columns of s + 1 that start
                         at b, for every b; the first starts at 0, the last ends
                         at the end (no other columns are made)                    ``_join``
    pace                 W >= (m - 1 / v) sum_{s on r} sum_j t x, for every c, r   ``_pace``
    once per step        D >= sum_{s on r} sum_j d x, for every c, r               ``_pace``
    memory               sum_{s on r} sum_j (static + n[s] kept) x + M <= capacity,
                         for every vector n of microbatches in flight              ``_memory``
                         M >= transient of each stage on r                         ``_memory``

With one stage per rank, columns that do not fit are not made, and no memory row is needed.
Written with integer layer counts per stage and kind instead, instances of 126 layers on 16
stages took minutes; as columns they take milliseconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.search.columns import Column
from planner.search.solver import Minimisation, Solution, Term, is_chosen
from planner.strategy.configuration import Configuration
from planner.strategy.schedules import in_flight, rank_of_stage

_SCALED_OBJECTIVE = 1000.0
"""Seconds are scaled so that the incumbent is this: tolerances are absolute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProblem:
    """One configuration with its columns."""

    configuration: Configuration
    """What the columns were priced for."""
    columns: tuple[tuple[Column, ...], ...]
    """Columns of each stage in model order."""
    room_bytes: float | None
    """Memory of a rank less the reserve, where its stages compete for it; else None."""
    shared_bytes: float
    """Saved constants per microbatch in flight, counted where ``room_bytes`` is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSolution:
    """The chosen configuration and its stages."""

    problem: StageProblem
    """The configuration."""
    columns: tuple[Column, ...]
    """One per stage."""
    objective_s: float
    """Step time, re-priced from the columns."""
    bound_s: float
    """No choice among the given columns is faster."""
    status: str
    """"optimal" or "time limit"."""


def pace_factor(configuration: Configuration) -> float:
    """Times that the slowest rank's microbatch counts: m - 1 / v."""
    return configuration.num_microbatches - 1 / configuration.virtual_stages


def objective_s(configuration: Configuration, columns: Sequence[Column]) -> float:
    """Step time of a choice of columns, as the ILP's objective has it."""
    ranks = range(configuration.degrees.pp)
    by_rank = [
        [c for s, c in enumerate(columns) if rank_of_stage(s, len(ranks)) == r] for r in ranks
    ]
    pace_s = max(sum(column.microbatch_s for column in held) for held in by_rank)
    once_s = max(sum(column.step_s for column in held) for held in by_rank)
    passing_s = sum(column.microbatch_s for column in columns) / configuration.virtual_stages
    return passing_s + pace_factor(configuration) * pace_s + once_s


def solve_stages(
    problems: Sequence[StageProblem], *, scale_s: float, time_limit_s: float
) -> StageSolution:
    """Choose among configurations and cuts.

    Args:
        problems: Configurations with their columns.
        scale_s: A step time of the right size (the incumbent's).
        time_limit_s: Limit for the solver.

    Raises:
        SolverError: No choice exists, or none was found in time.
    """
    model = _Model(problems, _SCALED_OBJECTIVE / scale_s)
    solution: Solution = model.minimisation.solve(time_limit_s=time_limit_s)
    problem, columns = model.chosen()
    found_s = objective_s(problem.configuration, columns)
    return StageSolution(
        problem=problem,
        columns=columns,
        objective_s=found_s,
        bound_s=min(found_s, solution.bound / model.scale),
        status=solution.status,
    )


class _Model:
    """Variables and rows of one instance; times are multiplied by ``scale``."""

    def __init__(self, problems: Sequence[StageProblem], scale: float) -> None:
        self.minimisation = Minimisation("stages")
        self.scale = scale
        self._problems = problems
        self._pace: Term = (1.0, self.minimisation.non_negative())
        self._once: Term = (1.0, self.minimisation.non_negative())
        self.minimisation.add_cost([self._pace, self._once])
        self._chosen: list[Term] = [(1.0, self.minimisation.binary()) for _ in problems]
        self._x = [
            [[self.minimisation.binary() for _ in stage] for stage in problem.columns]
            for problem in problems
        ]
        self._choose()
        for index, problem in enumerate(problems):
            self._join(index, problem)
            self._pace_rows(index, problem)
            if problem.room_bytes is not None:
                self._memory(index, problem, problem.room_bytes)

    def _choose(self) -> None:
        """One configuration, one column for each of its stages; their price."""
        self.minimisation.equal(self._chosen, constant=1)
        for problem, chosen, stages in zip(self._problems, self._chosen, self._x, strict=True):
            share = self.scale / problem.configuration.virtual_stages
            for columns, variables in zip(problem.columns, stages, strict=True):
                self.minimisation.equal([(1.0, x) for x in variables], [chosen])
                self.minimisation.add_cost(
                    (column.microbatch_s * share, x)
                    for column, x in zip(columns, variables, strict=True)
                )

    def _join(self, index: int, problem: StageProblem) -> None:
        """Each stage starts where the one before it ends."""
        for stage in range(len(problem.columns) - 1):
            ends: dict[int, list[Term]] = {}
            starts: dict[int, list[Term]] = {}
            for column, x in zip(problem.columns[stage], self._x[index][stage], strict=True):
                ends.setdefault(column.end, []).append((1.0, x))
            following = zip(problem.columns[stage + 1], self._x[index][stage + 1], strict=True)
            for column, x in following:
                starts.setdefault(column.first, []).append((1.0, x))
            for cut in {**ends, **starts}:
                self.minimisation.equal(ends.get(cut, []), starts.get(cut, []))

    def _pace_rows(self, index: int, problem: StageProblem) -> None:
        """The slowest rank sets the pace; the dearest rank ends the step."""
        configuration = problem.configuration
        factor = pace_factor(configuration) * self.scale
        for rank in range(configuration.degrees.pp):
            held = self._held(index, problem, rank)
            self.minimisation.at_most(
                [(factor * column.microbatch_s, x) for _, column, x in held], [self._pace]
            )
            self.minimisation.at_most(
                [(self.scale * column.step_s, x) for _, column, x in held], [self._once]
            )

    def _memory(self, index: int, problem: StageProblem, room_bytes: float) -> None:
        """What the stages of a rank keep, in units of the room, with the highest transient."""
        configuration = problem.configuration
        for rank in range(configuration.degrees.pp):
            held = self._held(index, problem, rank)
            transient: Term = (1.0, self.minimisation.non_negative())
            for stage in {stage for stage, _, _ in held}:
                self.minimisation.at_most(
                    [
                        (column.mix.temporary_bytes / room_bytes, x)
                        for s, column, x in held
                        if s == stage
                    ],
                    [transient],
                )
            vectors = in_flight(
                configuration.schedule,
                pp=configuration.degrees.pp,
                virtual_stages=configuration.virtual_stages,
                num_microbatches=configuration.num_microbatches,
                rank=rank,
            )
            for counts in vectors:
                self.minimisation.at_most(
                    [
                        (_resident_bytes(problem, column, counts, stage) / room_bytes, x)
                        for stage, column, x in held
                    ]
                    + [transient],
                    constant=1.0,
                )

    def _held(
        self, index: int, problem: StageProblem, rank: int
    ) -> list[tuple[int, Column, object]]:
        """Stage, column and variable of everything that a rank may hold."""
        pp = problem.configuration.degrees.pp
        return [
            (stage, column, x)
            for stage, columns in enumerate(problem.columns)
            if rank_of_stage(stage, pp) == rank
            for column, x in zip(columns, self._x[index][stage], strict=True)
        ]

    def chosen(self) -> tuple[StageProblem, tuple[Column, ...]]:
        """The configuration and columns of the solution."""
        index = next(i for i, (_, u) in enumerate(self._chosen) if is_chosen(u))
        problem = self._problems[index]
        columns = tuple(
            next(column for column, x in zip(stage, variables, strict=True) if is_chosen(x))
            for stage, variables in zip(problem.columns, self._x[index], strict=True)
        )
        return problem, columns


def _resident_bytes(
    problem: StageProblem, column: Column, counts: tuple[int, ...], stage: int
) -> float:
    """Static memory and activations in flight of one stage at one moment of the schedule."""
    number = counts[stage // problem.configuration.degrees.pp]
    return column.static_bytes + number * (column.mix.kept_bytes + problem.shared_bytes)
