"""A bound on one configuration without an integer program: its linear relaxation.

The program of ``stage_ilp`` for one configuration, its choices taken in fractions. Every path of
the action list may join it, since any stage times, those of fractions too, have a longest path;
paths join until none is longer than the bound, or these become too many. What is solved again
after each path is a linear program of some hundred variables, milliseconds, so that this rules out
most configurations that would else need integer programs, and hands the paths on to those.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.pipeline import Path
from planner.cost.shared_cores import path_of
from planner.search.bounds import bounding_paths
from planner.search.columns import Column
from planner.search.stage_ilp import StageProblem
from planner.solver import LinearProgram, NoSolutionError

_SCALED_LIMIT = 1000.0
"""Seconds are scaled so that the limit is this: tolerances are absolute."""
_MOST_ROUNDS = 60
"""Paths that may join."""
_MOST_ACTIONS = 200_000
"""Actions of all lists that may be run for that, but for a few rounds."""
_LEAST_ROUNDS = 4
_ENOUGH = 1e-5
"""Share by which a path is longer than the bound for it to join."""
_STALL_ROUNDS = 10
_LEAST_GAIN = 1e-3
"""Share that the bound must gain in so many rounds."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxed:
    """What the relaxation of a configuration tells."""

    bound_s: float
    """No choice below the limit is faster; endless where there is none."""
    paths: tuple[Path, ...]
    """Paths of the action list beside ``bounding_paths`` that it took."""


def relaxed(problem: StageProblem, limit_s: float) -> Relaxed:
    """Bound the choices of one configuration.

    Args:
        problem: Its choices.
        limit_s: Steps that are no faster need not be told apart.
    """
    program = _Program(problem, _SCALED_LIMIT / limit_s)
    configuration = problem.configuration
    rounds = _MOST_ACTIONS // (2 * configuration.num_stages * configuration.num_microbatches)
    paths: list[Path] = []
    bounds: list[float] = []
    for _ in range(min(_MOST_ROUNDS, max(_LEAST_ROUNDS, rounds))):
        try:
            found = program.solve()
        except NoSolutionError:
            return Relaxed(bound_s=float("inf"), paths=tuple(paths))
        if found is None:
            break
        bounds.append(max(found.bound_s, bounds[-1] if bounds else 0.0))
        gained_from = bounds[max(0, len(bounds) - 1 - _STALL_ROUNDS)]
        stalls = len(bounds) > _STALL_ROUNDS and bounds[-1] < gained_from * (1 + _LEAST_GAIN)
        if bounds[-1] >= limit_s or stalls:
            break
        path = path_of(
            configuration,
            forward_s=found.forward_s,
            backward_s=found.backward_s,
            weight_backward_s=found.weight_s,
        )
        if path.seconds(*found.stages_s) <= found.passing_s * (1 + _ENOUGH):
            break
        program.add([path])
        paths.append(path)
    return Relaxed(bound_s=bounds[-1] if bounds else 0.0, paths=tuple(paths))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fraction:
    """A solution in fractions, seconds."""

    bound_s: float
    passing_s: float
    """All microbatches, by the paths that are known."""
    forward_s: list[float]
    """By stage."""
    backward_s: list[float]
    """By stage."""
    weight_s: list[float]
    """The part of it that no stage waits for, by stage."""

    @property
    def stages_s(self) -> tuple[list[float], list[float], list[float]]:
        """All three."""
        return self.forward_s, self.backward_s, self.weight_s


class _Program:
    """Variables: all microbatches, the dearest end of a step, then each choice of each part."""

    def __init__(self, problem: StageProblem, scale: float) -> None:
        self._problem = problem
        self._scale = scale
        self._parts = len(problem.choices)
        self._starts = np.cumsum([2, *(len(choices) for choices in problem.choices)])
        self._num = int(self._starts[-1])
        configuration = problem.configuration
        self._parts_s = np.zeros((3, configuration.num_stages, self._num))
        self._step_s = np.zeros((configuration.degrees.pp, self._num))
        for stage in range(configuration.num_stages):
            columns, at = self._columns(stage), self._places(stage)
            self._parts_s[:, stage, at] = np.array([column.parts_s for column in columns]).T
            rank = configuration.rank_of(stage)
            self._step_s[rank, at] += [column.step_s for column in columns]
        transients = self._transients()
        most = np.full(self._num + len(transients), np.inf)
        most[2 : self._num] = 1.0
        costs = np.zeros(len(most))
        costs[:2] = 1.0
        self._program = LinearProgram(costs, most)
        self._choose()
        if problem.num_units is None:
            self._join()
        else:
            self._add_up(problem.num_units)
        self.add(bounding_paths(configuration))
        once = self._step_s * scale
        once[:, 1] = -1.0
        self._program.add_rows(once, np.zeros(len(once)))
        if problem.room_bytes is not None:
            self._memory(transients, problem.room_bytes)

    def solve(self) -> _Fraction | None:
        """Solve; None where the solver came to no optimum, NoSolutionError where there is none."""
        found = self._program.minimise()
        if found is None:
            return None
        objective, values = found
        chosen = values[: self._num]
        forward_s, input_s, weight_s = self._parts_s @ chosen
        return _Fraction(
            bound_s=objective / self._scale,
            passing_s=float(chosen[0]) / self._scale,
            forward_s=forward_s.tolist(),
            backward_s=(input_s + weight_s).tolist(),
            weight_s=weight_s.tolist(),
        )

    def add(self, paths: Sequence[Path]) -> None:
        """All microbatches take as long as each path."""
        counts = np.array([path.counts for path in paths], dtype=float)
        rows = np.einsum("ncs,csx->nx", counts, self._parts_s) * self._scale
        rows[:, 0] = -1.0
        self._program.add_rows(rows, np.zeros(len(rows)))

    def _places(self, stage: int) -> slice:
        """Variables of the choices that a stage is part of."""
        part = self._part(stage)
        return slice(int(self._starts[part]), int(self._starts[part + 1]))

    def _columns(self, stage: int) -> list[Column]:
        """What a stage is under each of these choices."""
        place = stage // self._problem.configuration.degrees.pp if self._problem.by_rank else 0
        return [held[place] for held in self._problem.choices[self._part(stage)]]

    def _part(self, stage: int) -> int:
        """Which choices a stage is part of: those of its rank, or its own."""
        return self._problem.configuration.rank_of(stage) if self._problem.by_rank else stage

    def _choose(self) -> None:
        """One choice for each part."""
        rows = np.zeros((self._parts, self._num))
        for part in range(self._parts):
            rows[part, self._places(part)] = 1.0
        self._program.add_rows(rows, np.ones(self._parts), np.ones(self._parts))

    def _add_up(self, num_units: int) -> None:
        """The lengths of the stages add up to the model."""
        row = np.zeros((1, self._num))
        row[0, 2:] = [
            sum(column.end - column.first for column in held)
            for choices in self._problem.choices
            for held in choices
        ]
        units = np.array([float(num_units)])
        self._program.add_rows(row, units, units)

    def _join(self) -> None:
        """Each stage starts where the one before it ends."""
        rows: list[Floats] = []
        for stage in range(self._parts - 1):
            before, behind = self._columns(stage), self._columns(stage + 1)
            ends = np.array([column.end for column in before])
            starts = np.array([column.first for column in behind])
            for cut in np.unique(np.concatenate([ends, starts])):
                row = np.zeros(self._num)
                row[self._places(stage)] = ends == cut
                row[self._places(stage + 1)] -= starts == cut
                rows.append(row)
        if rows:
            self._program.add_rows(np.array(rows), np.zeros(len(rows)), np.zeros(len(rows)))

    # -- memory of ranks whose stages are chosen apart -----------------------------------------

    def _transients(self) -> list[tuple[int, int]]:
        """Rank and moment of each variable for a highest transient."""
        if self._problem.room_bytes is None:
            return []
        configuration = self._problem.configuration
        return [
            (rank, at)
            for rank in range(configuration.degrees.pp)
            for at in range(len(configuration.fullest_moments(rank)))
        ]

    def _memory(self, transients: Sequence[tuple[int, int]], room_bytes: float) -> None:
        """What the stages of a rank hold, with the highest transient, in units of the room."""
        configuration = self._problem.configuration
        pp, width = configuration.degrees.pp, self._num + len(transients)
        rows: list[Floats] = []
        most: list[float] = []
        for rank in range(pp):
            row = np.zeros(width)
            for stage in configuration.stages_of(rank):
                row[self._places(stage)] = [
                    column.state.reduction_bytes / room_bytes for column in self._columns(stage)
                ]
            rows.append(row)
            most.append(1.0)
        for number, (rank, at) in enumerate(transients):
            moment = configuration.fullest_moments(rank)[at]
            held = np.zeros(width)
            held[self._num + number] = 1.0
            for place, stage in enumerate(configuration.stages_of(rank)):
                columns = self._columns(stage)
                held[self._places(stage)] = [
                    column.held_bytes(moment[place]) / room_bytes for column in columns
                ]
                transient = np.zeros(width)
                transient[self._places(stage)] = [
                    column.mix.transient_bytes(moment[place]) / room_bytes for column in columns
                ]
                transient[self._num + number] = -1.0
                rows.append(transient)
                most.append(0.0)
            rows.append(held)
            most.append(1.0)
        self._program.add_rows(np.array(rows), np.array(most))
