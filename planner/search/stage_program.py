"""The program of ``stage_ilp`` for one configuration, its choices taken in fractions.

Every path of the action list may join it, since any stage times, those of fractions too, have a
longest path. What is solved again after each path is a linear program of some hundred variables,
milliseconds. Paths that no longer matter leave it, and come back where they are violated.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.pipeline import Path
from planner.cost.shared_cores import path_of
from planner.search.bounds import bounding_paths
from planner.search.columns import Column
from planner.search.linear_program import LinearProgram, Optimum
from planner.search.stage_ilp import StageProblem

_SCALED_LIMIT = 1000.0
"""Seconds are scaled so that the limit is this: tolerances are absolute."""
_MOST_PATHS = 80
"""Paths that joined and are in the program before some leave."""
_SLACK_SOLUTIONS = 4
"""Solutions in a row that do not need a path for it to leave."""
_MOST_BACK = 3
"""Paths that come back at once."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fraction:
    """A solution in fractions, seconds."""

    bound_s: float
    passing_s: float
    """All microbatches, by the paths that are known."""
    chosen: Floats
    """Of each choice, one part of the configuration after the other."""
    least_more_s: Floats
    """What the whole of each choice adds to the bound at the least, where it has no share now."""
    parts_s: Floats
    """Forward, inputs' and weights' backward by stage."""


class StageProgram:
    """Variables: all microbatches, the dearest end of a step, then each choice of each part."""

    def __init__(self, problem: StageProblem, limit_s: float) -> None:
        """Set up.

        Args:
            problem: The choices.
            limit_s: A step time of the right size.
        """
        self._problem = problem
        self._scale = _SCALED_LIMIT / limit_s
        self._parts = len(problem.choices)
        self._starts = np.cumsum([2, *(len(choices) for choices in problem.choices)])
        self._num = int(self._starts[-1])
        configuration = problem.configuration
        self._parts_s = np.zeros((3, configuration.num_stages, self._num))
        self._step_s = np.zeros((configuration.degrees.pp, self._num))
        for stage in range(configuration.num_stages):
            columns, at = self._columns(stage), self._variables(stage)
            self._parts_s[:, stage, at] = np.array([column.parts_s for column in columns]).T
            rank = configuration.rank_of(stage)
            self._step_s[rank, at] += [column.step_s for column in columns]
        most = np.full(self._num, np.inf)
        most[2:] = 1.0
        costs = np.zeros(len(most))
        costs[:2] = 1.0
        self._program = LinearProgram(costs, most)
        self._choose()
        if problem.num_units is None:
            self._join()
        else:
            self._add_up(problem.num_units)
        self._add(_counts(bounding_paths(configuration)))
        self.units_of_ranks = self._units_of_ranks()
        """Units of each choice, in the row of its rank."""
        self._first_of_ranks = self._program.num_rows
        self._add_rest()
        self._num_rows = self._program.num_rows
        self.paths: list[Path] = []
        """Those that joined."""
        self._counts = np.zeros((0, 3, configuration.num_stages))
        self._inside = np.zeros(0, dtype=np.intp)
        self._unused = np.zeros(0, dtype=np.intp)
        self._allowed = np.ones(self._num - 2, dtype=bool)
        self._join_all(problem.paths)

    @property
    def size(self) -> int:
        """Choices of all parts."""
        return self._num - 2

    def places(self, part: int) -> slice:
        """Those of one part."""
        return slice(int(self._starts[part]) - 2, int(self._starts[part + 1]) - 2)

    def times_of(self, part: int) -> Floats:
        """Seconds of each choice of a part, a row for each part of each of its stages."""
        places = self.places(part)
        times = self._parts_s[:, :, 2:][:, :, places]
        times = times.reshape(-1, times.shape[-1])
        return times[times.any(axis=1)]

    def restrict(
        self, allowed: NDArray[np.bool_], fewest_units: Floats, most_units: Floats
    ) -> None:
        """Take some choices alone, and some numbers of units of each rank."""
        (changed,) = np.nonzero(allowed != self._allowed)
        self._program.limit(changed + 2, allowed[changed].astype(float))
        self._allowed = allowed
        rows = self._first_of_ranks + np.arange(len(most_units))
        self._program.limit_rows(rows, fewest_units, most_units)

    def solve(self) -> Fraction | None:
        """Solve; None where the solver came to no optimum, NoSolutionError where there is none."""
        found = self._program.minimise()
        if found is None:
            return None
        self._leave(found)
        return Fraction(
            bound_s=found.cost / self._scale,
            passing_s=float(found.values[0]) / self._scale,
            chosen=found.values[2:],
            least_more_s=found.reduced_costs[2:] / self._scale,
            parts_s=self._parts_s @ found.values,
        )

    def tighten(self, found: Fraction, enough: float) -> bool:
        """Let paths join that are longer than what a solution has for them.

        Args:
            found: The last solution.
            enough: Share by which they are longer at the least.

        Returns:
            Whether there was one.
        """
        most_s = found.passing_s * (1 + enough)
        known_s = np.einsum("ncs,cs->n", self._counts, found.parts_s)
        known_s[self._inside] = 0.0
        back = [
            int(path) for path in known_s.argsort()[::-1][:_MOST_BACK] if known_s[path] > most_s
        ]
        if back:
            self._enter(np.array(back))
            return True
        forward_s, input_s, weight_s = found.parts_s
        stages_s = forward_s.tolist(), (input_s + weight_s).tolist(), weight_s.tolist()
        path = path_of(
            self._problem.configuration,
            forward_s=stages_s[0],
            backward_s=stages_s[1],
            weight_backward_s=stages_s[2],
        )
        if path.seconds(*stages_s) <= most_s:
            return False
        self._join_all([path])
        return True

    def _join_all(self, paths: Sequence[Path]) -> None:
        if paths:
            first = len(self.paths)
            self.paths += paths
            self._counts = np.concatenate([self._counts, _counts(paths)])
            self._enter(np.arange(first, len(self.paths)))

    def _enter(self, paths: NDArray[np.intp]) -> None:
        self._add(self._counts[paths])
        self._inside = np.concatenate([self._inside, paths])
        self._unused = np.concatenate([self._unused, np.zeros_like(paths)])

    def _leave(self, found: Optimum) -> None:
        """Drop paths that solutions have not needed for long."""
        is_slack = found.is_slack[self._num_rows :]
        self._unused = np.where(is_slack, self._unused + 1, 0)
        (gone,) = np.nonzero(self._unused >= _SLACK_SOLUTIONS)
        if len(self._inside) > _MOST_PATHS and len(gone):
            self._program.drop_rows(gone + self._num_rows)
            self._inside = np.delete(self._inside, gone)
            self._unused = np.delete(self._unused, gone)

    def _add(self, counts: Floats) -> None:
        """All microbatches take as long as each path."""
        rows = np.einsum("ncs,csx->nx", counts, self._parts_s) * self._scale
        rows[:, 0] = -1.0
        self._program.add_rows(rows, np.zeros(len(rows)))

    def _variables(self, stage: int) -> slice:
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

    def _add_rest(self) -> None:
        """Units of each rank, which may be restricted; the dearest end; what ranks hold."""
        configuration, room_bytes = self._problem.configuration, self._problem.room_bytes
        units = np.pad(self.units_of_ranks, ((0, 0), (2, 0)))
        self._program.add_rows(units, np.full(configuration.degrees.pp, np.inf))
        once = self._step_s * self._scale
        once[:, 1] = -1.0
        self._program.add_rows(once, np.zeros(len(once)))
        if room_bytes is not None:
            self._memory(room_bytes)

    def _units_of_ranks(self) -> Floats:
        configuration = self._problem.configuration
        units = np.zeros((configuration.degrees.pp, self.size))
        for part, choices in enumerate(self._problem.choices):
            units[configuration.rank_of(part), self.places(part)] = [
                sum(column.end - column.first for column in held) for held in choices
            ]
        return units

    def _choose(self) -> None:
        """One choice for each part."""
        rows = np.zeros((self._parts, self._num))
        for part in range(self._parts):
            rows[part, self._variables(part)] = 1.0
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
                row[self._variables(stage)] = ends == cut
                row[self._variables(stage + 1)] -= starts == cut
                rows.append(row)
        if rows:
            self._program.add_rows(np.array(rows), np.zeros(len(rows)), np.zeros(len(rows)))

    def _memory(self, room_bytes: float) -> None:
        """What the stages of a rank hold, in units of the room, where they are chosen apart."""
        configuration = self._problem.configuration
        rows: list[Floats] = []
        for rank in range(configuration.degrees.pp):
            mine = [(self._variables(s), self._columns(s)) for s in configuration.stages_of(rank)]
            row = np.zeros(self._num)
            for at, columns in mine:
                row[at] = [column.state.reduction_bytes for column in columns]
            rows.append(row)
            for moment in configuration.fullest_moments(rank):
                row = np.zeros(self._num)
                for (at, columns), then in zip(mine, moment, strict=True):
                    row[at] = [column.held_bytes(then) for column in columns]
                rows.append(row)
        self._program.add_rows(np.array(rows) / room_bytes, np.ones(len(rows)))


def _counts(paths: Sequence[Path]) -> Floats:
    """How often paths take the parts of each stage."""
    return np.array([path.counts for path in paths], dtype=float)
