"""Second ILP: which configuration, and where its stages are cut.

Sets
    c in C           configurations (degrees, schedule, microbatch, ZeRO form, stream)
    s in S(c)        stages of a configuration in model order; stage s lies on rank r(s)
    j in J(c,s)      columns: a run of units [first, end) with a recomputation

Variables
    u[c]             1 where configuration c is chosen
    x[c,s,j]         1 where stage s of configuration c is column j
    P[c,k]           seconds of a microbatch in the slowest stage of turn k: the k-th stage of
                     every rank (one turn where a rank holds one stage)
    W                seconds that the slowest stages add over the step
    D                seconds once per step: exposed gradient and parameter traffic, optimiser
    M[c,r]           highest transient of rank r, where a rank holds several stages

Objective, with m[c] microbatches and v[c] stages per rank
    sum_c,s,j (1 / v[c]) t[c,s,j] x[c,s,j]  +  W  +  D

    One microbatch passes all stages (fill and drain, shortened v times where stages interleave),
    the other m - 1 / v follow at the pace of the slowest stages (Narayanan et al. 2021,
    2104.04473, section 2.2: bubble (p - 1) / v of a rank's time per microbatch). Ranks take
    turns together, so that each turn lasts as long as its slowest stage.

Constraints
    one configuration    sum_c u[c] = 1                                            ``_choose``
    one column a stage   sum_j x[c,s,j] = u[c]                                     ``_choose``
    contiguity           columns of s that end at b = columns of s + 1 that start
                         at b, for every b; the first starts at 0, the last ends
                         at the end (no other columns are made)                    ``_join``
                         where blocks are alike, a column stands for all runs of
                         its length, and the lengths add up to the model:
                         sum_s,j length x[c,s,j] = units u[c]                      ``_add_up``
    pace                 P[c,k] >= sum_j t x[c,s,j] for every s in turn k          ``_pace_rows``
                         W >= (m[c] - 1 / v[c]) sum_k P[c,k], for every c          ``_pace_rows``
    once per step        D >= sum_{s on r} sum_j d x, for every c, r               ``_once_rows``
    cutoff               the objective is at most the incumbent's, where one is
                         known                                                     ``_cut_off``
    memory               sum_{s on r} sum_j (static + n[s] kept) x + M <= capacity,
                         for every vector n of microbatches in flight              ``_memory``
                         M >= transient of each stage on r                         ``_memory``
                         sum_{s on r} sum_j reduction x <= capacity                ``_memory``

With one stage per rank, columns that do not fit are not made, and no memory row is needed.
Written with integer layer counts per stage and kind instead, instances of 126 layers on 16
stages took minutes; as columns they take milliseconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    num_units: int | None
    """Units of the model where blocks are alike, so that a column stands for all runs of its
    length; else None."""


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


def pace_s(configuration: Configuration, stage_s: Sequence[float]) -> float:
    """Seconds per microbatch at which the pipeline runs: the slowest stage of every turn."""
    pp = configuration.degrees.pp
    return sum(max(stage_s[turn : turn + pp]) for turn in range(0, len(stage_s), pp))


def objective_s(configuration: Configuration, columns: Sequence[Column]) -> float:
    """Step time of a choice of columns, as the ILP's objective has it."""
    pp = configuration.degrees.pp
    stage_s = [column.microbatch_s for column in columns]
    once_s = max(sum(column.step_s for column in columns[rank::pp]) for rank in range(pp))
    passing_s = sum(stage_s) / configuration.virtual_stages
    return passing_s + pace_factor(configuration) * pace_s(configuration, stage_s) + once_s


def solve_stages(
    problems: Sequence[StageProblem],
    *,
    scale_s: float,
    time_limit_s: float,
    cutoff_s: float | None = None,
) -> StageSolution:
    """Choose among configurations and cuts.

    Args:
        problems: Configurations with their columns.
        scale_s: A step time of the right size (the incumbent's).
        time_limit_s: Limit for the solver.
        cutoff_s: Step time that a choice must not exceed.

    Raises:
        NoSolutionError: No choice exists.
        SolverError: None was found in time.
    """
    model = _Model(problems, _SCALED_OBJECTIVE / scale_s)
    if cutoff_s is not None:
        model.cut_off(cutoff_s)
    solution: Solution = model.minimisation.solve(time_limit_s=time_limit_s)
    problem, columns = model.chosen()
    columns = _placed(columns)
    found_s = objective_s(problem.configuration, columns)
    return StageSolution(
        problem=problem,
        columns=columns,
        objective_s=found_s,
        bound_s=min(found_s, solution.bound / model.scale),
        status=solution.status,
    )


def _placed(columns: Sequence[Column]) -> tuple[Column, ...]:
    """Move columns that stand for all runs of their length to where they follow one another."""
    placed: list[Column] = []
    first = 0
    for column in columns:
        length = column.end - column.first
        placed.append(replace(column, first=first, end=first + length))
        first += length
    return tuple(placed)


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
            if problem.num_units is None:
                self._join(index, problem)
            else:
                self._add_up(index, problem, problem.num_units)
            self._pace_rows(index, problem)
            self._once_rows(index, problem)
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

    def _add_up(self, index: int, problem: StageProblem, num_units: int) -> None:
        """The lengths of the stages add up to the model."""
        lengths = [
            (float(column.end - column.first), x)
            for columns, variables in zip(problem.columns, self._x[index], strict=True)
            for column, x in zip(columns, variables, strict=True)
        ]
        self.minimisation.equal(lengths, [(float(num_units), self._chosen[index][1])])

    def _pace_rows(self, index: int, problem: StageProblem) -> None:
        """Each turn lasts as long as its slowest stage; the turns set the pace."""
        configuration = problem.configuration
        pp = configuration.degrees.pp
        turns: list[Term] = []
        for turn in range(configuration.virtual_stages):
            slowest = self.minimisation.non_negative()
            turns.append((pace_factor(configuration), slowest))
            for stage in range(turn * pp, (turn + 1) * pp):
                self.minimisation.at_most(
                    [
                        (self.scale * column.microbatch_s, x)
                        for column, x in zip(
                            problem.columns[stage], self._x[index][stage], strict=True
                        )
                    ],
                    [(1.0, slowest)],
                )
        self.minimisation.at_most(turns, [self._pace])

    def _once_rows(self, index: int, problem: StageProblem) -> None:
        """The dearest rank ends the step."""
        for rank in range(problem.configuration.degrees.pp):
            held = self._held(index, problem, rank)
            self.minimisation.at_most(
                [(self.scale * column.step_s, x) for _, column, x in held], [self._once]
            )

    def cut_off(self, cutoff_s: float) -> None:
        """Only choices whose objective is at most ``cutoff_s``."""
        self.minimisation.at_most(
            self.minimisation.costs, constant=self.scale * cutoff_s * (1 + 1e-9)
        )

    def _memory(self, index: int, problem: StageProblem, room_bytes: float) -> None:
        """What the stages of a rank keep, in units of the room, with the highest transient."""
        configuration = problem.configuration
        for rank in range(configuration.degrees.pp):
            held = self._held(index, problem, rank)
            self.minimisation.at_most(
                [(column.reduction_bytes / room_bytes, x) for _, column, x in held], constant=1.0
            )
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
