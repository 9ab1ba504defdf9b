"""Linear programs that are solved again and again as rows join them.

They go to HiGHS as arrays: it takes them up where it left them, and PuLP (``planner.solver``) would
build each anew.
"""

from dataclasses import dataclass

import highspy
import numpy as np
from numpy.typing import NDArray

from planner.solver import NoSolutionError

_MOST_ITERATIONS = 10
"""Iterations of a linear program, for each row and variable: one that was begun from an old basis
may go round for ever."""

_LINEAR = (
    ("output_flag", False),
    ("threads", 1),
    ("random_seed", 0),
    ("simplex_dual_edge_weight_strategy", 1),  # Devex: programs that change a little, many times
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The best point of a linear program."""

    cost: float
    """Of all variables."""
    values: NDArray[np.float64]
    """One for each variable."""
    reduced_costs: NDArray[np.float64]
    """What one more of each variable that is 0 costs at the least, all others adapted to it."""
    is_slack: NDArray[np.bool_]
    """For each row: the point is the best one without it, too."""
    gains: NDArray[np.float64]
    """What one more of what each row is at most saves."""


class LinearProgram:
    """A linear program of variables between 0 and a bound, whose rows are at most something.

    Give coefficients of the order of 1 to 1000: the solver's tolerances are absolute (1e-7).
    """

    def __init__(self, costs: NDArray[np.float64], most: NDArray[np.float64]) -> None:
        """Start without rows.

        Args:
            costs: What one of each variable costs.
            most: What each variable is at most; may be endless.
        """
        self._solver = highspy.Highs()  # type: ignore[no-untyped-call]
        for name, value in _LINEAR:
            self._solver.setOptionValue(name, value)
        self._solver.addVars(len(costs), np.zeros(len(costs)), most)
        self._solver.changeColsCost(len(costs), np.arange(len(costs), dtype=np.int32), costs)

    def add_rows(
        self,
        rows: NDArray[np.float64],
        most: NDArray[np.float64],
        least: NDArray[np.float64] | None = None,
    ) -> None:
        """Require least <= rows @ variables <= most.

        Args:
            rows: A row of coefficients each.
            most: One number for each row.
            least: One number for each row, None for no such limit.
        """
        counts = np.count_nonzero(rows, axis=1)
        at, variables = np.nonzero(rows)
        self._solver.addRows(
            len(rows),
            np.full(len(rows), -highspy.kHighsInf) if least is None else least,
            most,
            len(at),
            np.concatenate([[0], counts.cumsum()[:-1]]).astype(np.int32),
            variables.astype(np.int32),
            rows[at, variables],
        )

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return int(self._solver.getNumRow())

    def drop_rows(self, rows: NDArray[np.intp]) -> None:
        """Require these rows no more; those behind them move up."""
        self._solver.deleteRows(len(rows), rows.astype(np.int32))

    def limit(self, variables: NDArray[np.intp], most: NDArray[np.float64]) -> None:
        """Let each of these variables be at most so much."""
        least = np.zeros(len(variables))
        self._solver.changeColsBounds(len(variables), variables.astype(np.int32), least, most)

    def limit_rows(
        self, rows: NDArray[np.intp], least: NDArray[np.float64], most: NDArray[np.float64]
    ) -> None:
        """Let each of these rows be at least and at most so much."""
        self._solver.changeRowsBounds(  # type: ignore[attr-defined]  # its types lack it
            len(rows), rows.astype(np.int32), least, most
        )

    def minimise(self) -> Optimum | None:
        """The least cost, and where it is.

        Returns:
            None where the solver came to no optimum.

        Raises:
            NoSolutionError: There is no feasible point.
        """
        most = _MOST_ITERATIONS * (self._solver.getNumCol() + self._solver.getNumRow())
        self._solver.setOptionValue("simplex_iteration_limit", most)
        for _ in range(2):
            self._solver.run()
            status = self._solver.getModelStatus()
            if status != highspy.HighsModelStatus.kIterationLimit:
                break
            self._solver.clearSolver()  # without the basis from which it goes round
        if status == highspy.HighsModelStatus.kInfeasible:
            raise NoSolutionError("the solver ended with a proof that there is no solution")
        if status != highspy.HighsModelStatus.kOptimal:
            return None
        solution, basic = self._solver.getSolution(), highspy.HighsBasisStatus.kBasic
        return Optimum(
            cost=float(self._solver.getInfo().objective_function_value),
            values=np.array(solution.col_value),
            reduced_costs=np.array(solution.col_dual),
            is_slack=np.array([row == basic for row in self._solver.getBasis().row_status], bool),
            gains=-np.array(solution.row_dual),
        )
