"""The solver: PuLP with HiGHS. Nothing else in the program imports PuLP."""

from collections.abc import Iterable
from dataclasses import dataclass

import pulp

from planner.errors import SolverError

Term = tuple[float, "pulp.LpVariable"]


class NoSolutionError(SolverError):
    """The program is proven to have no feasible point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What the solver returned."""

    status: str
    """"optimal" or "time limit"."""
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

    def solve(self, *, time_limit_s: float, gap: float = 0.0) -> Solution:
        """Minimise.

        Args:
            time_limit_s: Stop after this time with the best solution found.
            gap: Relative gap at which to stop; 0 proves optimality to the solver's tolerance.

        Raises:
            NoSolutionError: There is no feasible point.
            SolverError: No solver, or no feasible point found in time.
        """
        self._problem.setObjective(_difference(self.costs, ()))
        solver = pulp.HiGHS(
            msg=False, timeLimit=time_limit_s, gapRel=gap, gapAbs=0.0, threads=1, random_seed=0
        )
        if not solver.available():
            raise SolverError("HiGHS is not installed", hint="pip install 'highspy>=1.15.1'")
        self._problem.solve(solver)
        if self._problem.sol_status == pulp.LpSolutionInfeasible:
            raise NoSolutionError("the solver ended with a proof that there is no solution")
        status = pulp.LpSolution[self._problem.sol_status]
        if self._problem.sol_status not in (
            pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible,
        ):  # fmt: skip
            raise SolverError(
                f"the solver ended with status {status!r} and no solution",
                hint="raise --time-limit, or fix some axes with --fix",
            )
        objective = float(pulp.value(self._problem.objective))
        info = self._problem.solverModel.getInfo()
        bound = float(info.mip_dual_bound) if self._has_integers() else objective
        optimal = self._problem.sol_status == pulp.LpSolutionOptimal
        return Solution(
            status="optimal" if optimal else "time limit",
            objective=objective,
            bound=min(bound, objective),
        )

    def _has_integers(self) -> bool:
        return any(variable.cat == pulp.LpInteger for variable in self._problem.variables())


def is_chosen(variable: "pulp.LpVariable") -> bool:
    """Whether a binary variable is 1 in the solution (solvers return 0.9999999)."""
    return float(variable.value()) > 0.5


def value_of(variable: "pulp.LpVariable") -> float:
    """Value of a variable in the solution."""
    return float(variable.value())


def _difference(left: Iterable[Term], right: Iterable[Term]) -> "pulp.LpAffineExpression":
    """The expression sum(left) - sum(right); a variable may stand on both sides."""
    coefficients: dict[pulp.LpVariable, float] = {}
    for sign, terms in ((1.0, left), (-1.0, right)):
        for coefficient, variable in terms:
            coefficients[variable] = coefficients.get(variable, 0.0) + sign * coefficient
    return pulp.LpAffineExpression(list(coefficients.items()))
