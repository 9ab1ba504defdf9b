"""Programs with decisions: PuLP with HiGHS. Nothing else in the program imports PuLP."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import highspy
import numpy as np
import pulp
from numpy.typing import NDArray

from planner.errors import SolverError

Term = tuple[float, "pulp.LpVariable"]

_WITHOUT_SUB_MIPS = {
    "mip_heuristic_run_rins": False,
    "mip_heuristic_run_rens": False,
    "mip_heuristic_run_root_reduced_cost": False,
}
"""HiGHS 1.15.1 corrupts memory in the heuristics that solve smaller programs of their own
(vtjeng/MIPVerify.jl#219, FlexMeasures/flexmeasures#2527); the process dies later, anywhere. Older
releases return wrong solutions (ERGO-Code/HiGHS#2980)."""

_WITHOUT_SPARSIFY = {"presolve_rule_off": 1 << 14}
"""Presolve goes round for ever in programs of a few dozen variables where it makes rows sparser
(ERGO-Code/HiGHS#1883, #2915), and asks meanwhile neither for the time nor whether it may go on."""


_LEAST_SOLVER_S = 1.0
"""Time that a program gets in any case: enough for most instances."""

_WHOLE = 1e-7
"""How far from a whole number a variable may be that is one."""


class NoSolutionError(SolverError):
    """The program is proven to have no feasible point."""


class NoneFoundError(SolverError):
    """The limits were reached before any feasible point."""

    def __init__(self, message: str, *, hint: str, bound: float) -> None:
        """Keep what is proven: no feasible point is below ``bound``, in the model's unit."""
        super().__init__(message, hint=hint)
        self.bound = bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much work a program may be."""

    most_checks: int = 300
    """Checks of the solver, for each solution."""
    deadline_s: float = float("inf")
    """When all of them end, on the monotonic clock; the first has ``_LEAST_SOLVER_S`` anyway."""

    @property
    def left_s(self) -> float | None:
        """Seconds to the deadline, None where there is none."""
        if self.deadline_s == float("inf"):
            return None
        return max(_LEAST_SOLVER_S, self.deadline_s - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether the deadline has come."""
        return time.monotonic() > self.deadline_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What the solver returned."""

    status: str
    """"optimal" or "limit"."""
    objective: float
    """Value of the solution, in the model's unit."""
    bound: float
    """Proven lower bound, in the model's unit."""


class Minimisation:
    """A mixed-integer program that is built row by row and minimised once.

    Give coefficients of the order of 1 to 1000: the solver's tolerances are absolute (1e-6).
    """

    def __init__(self, name: str) -> None:
        """Start an empty program."""
        self._problem = pulp.LpProblem(name, pulp.LpMinimize)
        self.costs: list[Term] = []
        self._count = 0

    def binary(self) -> "pulp.LpVariable":
        """Add a variable that is 0 or 1."""
        self._count += 1
        return self._problem.add_variable(f"b{self._count}", cat=pulp.LpBinary)

    def non_negative(self) -> "pulp.LpVariable":
        """Add a continuous variable >= 0."""
        self._count += 1
        return self._problem.add_variable(f"c{self._count}", lowBound=0)

    def add_cost(self, terms: Iterable[Term]) -> None:
        """Add terms to the objective."""
        self.costs += terms

    def equal(self, left: Iterable[Term], right: Iterable[Term] = (), constant: float = 0) -> None:
        """Require sum(left) == sum(right) + constant."""
        self._problem += _difference(left, right) == constant

    def at_most(
        self, left: Iterable[Term], right: Iterable[Term] = (), constant: float = 0
    ) -> None:
        """Require sum(left) <= sum(right) + constant."""
        self._problem += _difference(left, right) <= constant

    def solve(
        self,
        *,
        most_checks: int,
        time_limit_s: float | None = None,
        is_mostly_whole: bool = False,
    ) -> Solution:
        """Minimise, to a gap of 0.

        The solver asks at fixed points of its work whether it may go on. Counting these ends it at
        the same point on every machine, however busy; seconds do not.

        Args:
            most_checks: How often it may go on.
            time_limit_s: Stop after this time as well; None for no such limit.
            is_mostly_whole: Try it without integrality first: where the solution is whole all the
                same it is the best one, and a fifth of the time.

        Raises:
            NoSolutionError: There is no feasible point.
            NoneFoundError: No feasible point was found within the limits.
            SolverError: There is no solver.
        """
        self._problem.setObjective(_difference(self.costs, ()))
        whole = is_mostly_whole and self._is_whole_without_integrality(time_limit_s)
        for presolve in () if whole else ("choose", "off"):
            self._problem.solve(_solver(most_checks, time_limit_s, presolve))
            # Some small programs end in an error where presolve has reduced them.
            if self._problem.solverModel.getModelStatus() != highspy.HighsModelStatus.kSolveError:
                break
        return self._solution(whole=whole)

    def _solution(self, *, whole: bool) -> Solution:
        """What the solver ended with; raises what ``solve`` does."""
        if self._problem.sol_status == pulp.LpSolutionInfeasible:
            raise NoSolutionError("the solver ended with a proof that there is no solution")
        info = self._problem.solverModel.getInfo()
        found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        if not found or self._problem.sol_status not in (
            pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible,
        ):  # fmt: skip
            status = pulp.LpSolution[self._problem.sol_status]
            raise NoneFoundError(
                f"the solver ended with status {status!r} and no solution",
                hint="give it more time with --time-limit, or fix some axes with --fix",
                bound=float(info.mip_dual_bound),
            )
        objective = float(pulp.value(self._problem.objective))
        bound = objective if whole or not self._has_integers() else float(info.mip_dual_bound)
        optimal = self._problem.sol_status == pulp.LpSolutionOptimal
        return Solution(
            status="optimal" if optimal else "limit",
            objective=objective,
            bound=min(bound, objective),
        )

    def _is_whole_without_integrality(self, time_limit_s: float | None) -> bool:
        """Solve the relaxation; whether it is solved, and its solution one of the program."""
        self._problem.solve(_solver(0, time_limit_s, "choose", mip=False))
        optimal = self._problem.solverModel.getModelStatus() == highspy.HighsModelStatus.kOptimal
        return optimal and all(
            abs(variable.value() - round(variable.value())) <= _WHOLE
            for variable in self._problem.variables()
            if variable.cat == pulp.LpInteger
        )

    def _has_integers(self) -> bool:
        return any(variable.cat == pulp.LpInteger for variable in self._problem.variables())


class _FromArrays(pulp.HiGHS):  # type: ignore[misc]  # PuLP has no types
    """PuLP's HiGHS, which hands a program over in one piece.

    Column by column and row by row, as PuLP does, takes longer than most programs take to solve.
    """

    def buildSolverModel(self, lp: "pulp.LpProblem") -> None:  # noqa: N802  # PuLP's name
        """Give the program's variables and rows to the solver."""
        variables, rows = lp.variables(), lp.constraints()
        for index, variable in enumerate(variables):
            variable.index = index
        for index, row in enumerate(rows):
            row.index = index
        solver, number = lp.solverModel, len(variables)
        every = np.arange(number, dtype=np.int32)
        solver.addVars(
            number,
            _or_endless((variable.lowBound for variable in variables), -1),
            _or_endless((variable.upBound for variable in variables), 1),
        )
        costs = np.array([lp.objective.get(variable, 0.0) for variable in variables], dtype=float)
        solver.changeColsCost(number, every, costs)
        if self.mip:
            is_whole = [variable.cat == pulp.LpInteger for variable in variables]
            kinds = [_INTEGER if whole else _CONTINUOUS for whole in is_whole]
            solver.changeColsIntegrality(number, every, np.array(kinds))
        solver.addRows(
            len(rows),
            _or_endless((row.getLb() for row in rows), -1),
            _or_endless((row.getUb() for row in rows), 1),
            sum(map(len, rows)),
            np.array([0, *accumulate(map(len, rows))][:-1], dtype=np.int32),
            np.array([each.index for row in rows for each in row], dtype=np.int32),
            np.array([part for row in rows for part in row.values()], dtype=float),
        )


_INTEGER, _CONTINUOUS = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous


def _or_endless(limits: Iterable[float | None], sign: int) -> NDArray[np.float64]:
    endless = sign * highspy.kHighsInf
    return np.array([endless if each is None else each for each in limits], dtype=float)


def _solver(
    most_checks: int, time_limit_s: float | None, presolve: str, *, mip: bool = True
) -> "pulp.HiGHS":
    """HiGHS with the options of all programs."""
    solver = _FromArrays(
        mip=mip, msg=False, timeLimit=time_limit_s, gapRel=0.0, gapAbs=0.0, threads=1,
        random_seed=0,
        callbackTuple=(_stop_after(most_checks), None),
        callbacksToActivate=[highspy.cb.HighsCallbackType.kCallbackMipInterrupt],
        presolve=presolve,
        **_WITHOUT_SUB_MIPS,
        **_WITHOUT_SPARSIFY,
    )  # fmt: skip
    if not solver.available():
        raise SolverError("HiGHS is not installed", hint="pip install 'highspy>=1.15.1,<1.16'")
    return solver


def _stop_after(most_checks: int) -> Callable[..., None]:
    """A callback of HiGHS that ends it at its next check after so many."""
    checks = 0

    def check(kind: object, message: str, data: object, answer: Any, own: object) -> None:  # noqa: ANN401  # as highspy calls it
        nonlocal checks
        checks += 1
        answer.user_interrupt = checks > most_checks

    return check


def is_chosen(variable: "pulp.LpVariable") -> bool:
    """Whether a binary variable is 1 in the solution (solvers return 0.9999999)."""
    return float(variable.value()) > 0.5


def _difference(left: Iterable[Term], right: Iterable[Term]) -> "pulp.LpAffineExpression":
    """The expression sum(left) - sum(right); a variable may stand on both sides."""
    coefficients: dict[pulp.LpVariable, float] = {}
    for sign, terms in ((1.0, left), (-1.0, right)):
        for coefficient, variable in terms:
            coefficients[variable] = coefficients.get(variable, 0.0) + sign * coefficient
    return pulp.LpAffineExpression(list(coefficients.items()))
