"""What no choice of kinds for the blocks of a knapsack takes less than.

With part of a block of each kind, x[b, k], a limit is a row for each block b'

    sum over b, k of w[b, k] x[b, k]  <=  -come
    w[b, k]  =  a m[b, k]  -  what of it is gone, at the most  -  r[b, k] where b is b'

and a linear program chooses x, with the rows that its points exceed. What one more of each row's
right side would save (u, seconds; any others would do) makes a bound of whole choices as well:

    sum over b of min over k of (s[b, k] + sum over rows of u w[b, k])  +  sum over rows of u come
"""

from typing import NamedTuple

import numpy as np

from planner.search.knapsack import Floats, Knapsack, Places
from planner.search.linear_program import LinearProgram
from planner.solver import NoSolutionError

_MOST_ROUNDS = 20
"""Points that are looked at."""

_ENOUGH = 1e-6
"""Share of the largest limit by which points may exceed others."""


class Bound(NamedTuple):
    """What no choice takes less than."""

    least_s: float
    """Seconds."""
    worths: Floats
    """Of a unit of each row, seconds."""
    weights: Floats
    """What blocks add up to, by row, block and kind."""
    most: Floats
    """What that may be, by row."""


def bound_of(problem: Knapsack) -> tuple[Bound | None, Places]:
    """What no choice takes less than, and the one nearest to the best point.

    Returns:
        The bound, None where the limits leave no choice.
    """
    number, kinds = problem.seconds.shape
    rows = _Rows(problem)
    most_kept = float((problem.each.max() * problem.kept).max())
    scale = max(float(np.abs(problem.most).max()), most_kept) / 1000 or 1.0
    scale_s = float(problem.seconds.max()) or 1.0
    program = LinearProgram(problem.seconds.ravel() / scale_s, np.full(number * kinds, np.inf))
    ones = np.ones(number)
    program.add_rows(np.repeat(np.eye(number), kinds, axis=1), ones, ones)
    point = np.eye(kinds)[problem.seconds.argmin(axis=1)]
    weights, most, worths = np.zeros((0, number, kinds)), np.zeros(0), np.zeros(0)
    for _ in range(_MOST_ROUNDS):
        excess = rows.excess(point)
        at = np.unravel_index(int(excess.argmax()), excess.shape)
        if excess[at] <= _ENOUGH * 1000 * scale:
            break
        weight, highest = rows.of(int(at[0]), int(at[1]))
        weights, most = np.concatenate([weights, weight[None]]), np.append(most, highest)
        program.add_rows(weight.reshape(1, -1) / scale, most[-1:] / scale)
        try:
            found = program.minimise()
        except NoSolutionError:
            return None, problem.seconds.argmin(axis=1)
        if found is None:
            break
        point = found.values.reshape(number, kinds)
        worths = np.maximum(0.0, found.gains[number:]) * scale_s / scale
    weights, most = weights[: len(worths)], most[: len(worths)]
    costs = problem.seconds + np.tensordot(worths, weights, axes=1)
    least_s = float(costs.min(axis=1).sum() - worths @ most)
    pays = worths > 0
    return Bound(least_s, worths[pays], weights[pays], most[pays]), point.argmax(axis=1)


class _Rows:
    """The rows of a knapsack's limits."""

    def __init__(self, problem: Knapsack) -> None:
        """Tell what is gone behind each block."""
        self._problem = problem
        self._gone = problem.sizes.copy()
        self._come = np.zeros(len(problem.sizes) + 1)
        self._behind = np.zeros(len(problem.sizes), dtype=np.intp)
        for each in problem.sections:
            inside = slice(each.blocks.start, each.blocks.stop)
            self._come[each.blocks.start] = each.come
            if len(each.blocks) == 1:
                self._gone[inside] = np.maximum(0.0, problem.sizes[inside] - each.left)
            else:  # at the most
                self._come[each.blocks.start] += min(0.0, each.left)
            self._behind[inside] = each.blocks.stop
        self._come = self._come[::-1].cumsum()[::-1]

    def excess(self, point: Floats) -> Floats:
        """By how much a point exceeds each row, by limit and block."""
        problem = self._problem
        gone = np.append((self._gone * point).sum(axis=1)[::-1].cumsum()[::-1], 0.0) - self._come
        held = problem.each[:, None] * (problem.kept * point).sum()
        held = held - problem.goes[:, None] * gone[self._behind]
        excess: Floats = held - (problem.most * point).sum(axis=2)
        return excess

    def of(self, limit: int, block: int) -> tuple[Floats, float]:
        """The row of a block, and what it is at most."""
        problem, behind = self._problem, int(self._behind[block])
        goes = problem.goes[limit]
        weights = problem.each[limit] * problem.kept
        weights[behind:] -= goes * self._gone[behind:]
        weights[block] -= problem.most[limit, block]
        return weights, -float(goes * self._come[behind])
