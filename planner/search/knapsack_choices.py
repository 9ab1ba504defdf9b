"""The fastest choice of kinds for the blocks of a knapsack.

Blocks are gone through from the last on. Choices for those so far are dropped where by the bound
they cannot be faster than one that is known, where the others would keep too much, and where
another takes and keeps no more. Too many are dropped as well, and what they take at the least is a
bound of what is found.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.search.knapsack import Floats, Knapsack, Places
from planner.search.knapsack_bounds import Bound, bound_of

_MOST_STATES = (60, 6000)
"""Choices for the blocks so far that are kept, of those that keep alike much the best: to have one
that is known, and then to prove it."""

_SECONDS, _KEPT, _SIZE, _GONE, _MOST, _WEIGHTS = range(6)
"""Rows of choices for the last blocks: what they take and keep; what the section so far keeps and
what is gone of those behind; what all blocks may keep; what they weigh in each row of the bound."""

_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A kind for each block."""

    kinds: Places
    """Their places."""
    seconds: float
    """What they take."""
    least_s: float
    """No choice takes less."""


def fastest(problem: Knapsack, *, tolerance_s: float) -> Choice | None:
    """The fastest choice of kinds within the limits, None where there is none.

    Args:
        problem: The blocks.
        tolerance_s: By how much another choice may be faster.
    """
    kinds = problem.seconds.argmin(axis=1)
    if problem.excess(kinds).max() <= 0:
        seconds = problem.seconds_of(kinds)
        return Choice(kinds=kinds, seconds=seconds, least_s=seconds)
    bound, near = bound_of(problem)
    if bound is None:
        return None
    met = (each for each in (near, problem.kept.argmin(axis=1)) if problem.excess(each).max() <= 0)
    return _searched(problem, bound, min(met, key=problem.seconds_of, default=None), tolerance_s)


def _searched(
    problem: Knapsack, bound: Bound, best: Places | None, tolerance_s: float
) -> Choice | None:
    """The fastest choice, from one that is known and what none takes less than."""
    best_s = np.inf if best is None else problem.seconds_of(best)
    least_s = bound.least_s
    for most_states in _MOST_STATES:
        is_better = True  # fewer are left of the next ones
        while is_better and least_s < best_s - tolerance_s:
            found, least_s = _States(problem, bound).better(best_s, tolerance_s, most_states)
            is_better = found is not None and problem.seconds_of(found) < best_s
            if found is not None and is_better:
                best, best_s = found, problem.seconds_of(found)
    if best is None:
        return None
    return Choice(kinds=best, seconds=best_s, least_s=min(best_s, max(least_s, bound.least_s)))


class _States:
    """Choices for more and more of the last blocks."""

    def __init__(self, problem: Knapsack, bound: Bound) -> None:
        """Sum up what the blocks before each take and keep.

        Args:
            problem: The blocks.
            bound: What no choice takes less than.
        """
        self._problem = problem
        self._worths, self._weights, self._most_weights = bound.worths, bound.weights, bound.most
        costs = problem.seconds + np.tensordot(bound.worths, bound.weights, axes=1)
        self._least_cost = _before(costs.min(axis=1))
        self._most_weight = _before(bound.weights.max(axis=2))
        self._least_kept = _before(problem.kept.min(axis=1))
        self._most_kept = _before(problem.kept.max(axis=1))
        self._each, self._goes = problem.each[:, None], problem.goes[:, None]
        lowest = np.minimum.accumulate(problem.most.min(axis=2), axis=1)
        self._lowest = np.concatenate([np.full_like(lowest[:, :1], np.inf), lowest], axis=1)
        come = np.zeros(len(problem.kept))
        for each in problem.sections:
            come[each.blocks.start] = max(0.0, each.come)
        self._come = _before(come)
        self._section = {each.blocks.start: each for each in problem.sections}
        self._left = [each.left for each in problem.sections for _ in each.blocks]
        self._steps: list[Places] = []

    def better(
        self, known_s: float, tolerance_s: float, most_states: int
    ) -> tuple[Places | None, float]:
        """Kinds that take less than some do that are known, None where there are none.

        Returns:
            They, and what no choice takes less than.
        """
        dropped_s = np.inf
        states = np.zeros((_WEIGHTS + len(self._worths), 1))
        states[_MOST] = np.inf
        for block in reversed(range(len(self._problem.seconds))):
            states = self._with(states, block)
            least_s = self._least_s(states, block)
            may_be = self._fits(states, block) & (least_s < known_s - tolerance_s)
            places = self._unbeaten(states, block, np.flatnonzero(may_be))
            places, lost_s = _some(states[_KEPT], least_s, places, most_states)
            dropped_s = min(dropped_s, lost_s)
            self._steps.append(places)
            states = states[:, places]
            if not len(places):
                return None, min(known_s - tolerance_s, dropped_s)
        at = int(states[_SECONDS].argmin())
        best_s = float(states[_SECONDS, at])
        return self._followed(at), min(best_s, known_s - tolerance_s, dropped_s)

    def _with(self, states: Floats, block: int) -> Floats:
        """The same with each kind of one more block."""
        problem, before = self._problem, states.shape[1]
        found = np.repeat(states, problem.seconds.shape[1], axis=1)
        adds = (_SECONDS, problem.seconds), (_KEPT, problem.kept), (_SIZE, problem.sizes)
        for row, each in adds:
            found[row] += np.tile(each[block], before)
        found[_WEIGHTS:] += np.tile(self._weights[:, block], before)
        most = np.tile(problem.most[:, block], before)
        most += self._goes * found[_GONE]
        endless = np.where(most < 0, -np.inf, np.inf)
        np.divide(most, self._each, out=endless, where=self._each > 0)
        found[_MOST] = np.minimum(found[_MOST], endless.min(axis=0) * (1 + _ROUNDING))
        if (section := self._section.get(block)) is not None:
            found[_GONE] += np.maximum(0.0, found[_SIZE] - section.left) - section.come
            found[_SIZE] = 0.0
        return found

    def _least_s(self, states: Floats, block: int) -> Floats:
        """What no choice takes less than that has these for the blocks from one on."""
        weight = states[_WEIGHTS:]
        left = np.minimum(self._most_weights[:, None] - weight, self._most_weight[:, [block]])
        least_s: Floats = states[_SECONDS] + self._least_cost[block] - self._worths @ left
        return least_s

    def _fits(self, states: Floats, block: int) -> NDArray[np.bool_]:
        """Whether others may keep so little that all are within the limits."""
        fits: NDArray[np.bool_] = states[_KEPT] + self._least_kept[block] <= states[_MOST]
        return fits

    def _unbeaten(self, states: Floats, block: int, places: Places) -> Places:
        """Those of some choices that no other beats, whatever others have."""
        if len(places) < 2:
            return places
        sizes = self._sizes(states[:, places], block)
        varied = sizes[np.ptp(sizes, axis=1) > 0]
        if not len(varied):
            return places[[int(states[_SECONDS, places].argmin())]]
        ranks = np.unique([np.unique(row, return_inverse=True)[1] for row in varied], axis=0)
        first, group = int(ranks.max(axis=1).argmax()), np.zeros(len(places), dtype=np.intp)
        for row in np.delete(ranks, first, axis=0):
            group = np.unique(group * (row.max() + 1) + row, return_inverse=True)[1]
        seconds = states[_SECONDS, places]
        order = np.lexsort((seconds, ranks[first], group))
        # Each group by itself: what is taken in it is moved below all that was before.
        taken_s = seconds[order] - group[order] * (np.ptp(seconds) + 1.0)
        is_faster = taken_s[1:] < np.minimum.accumulate(taken_s)[:-1]
        unbeaten: Places = places[np.sort(order[np.append(True, is_faster)])]
        return unbeaten

    def _sizes(self, states: Floats, block: int) -> Floats:
        """Of choices, what others have the more room for the less it is.

        Where no other block can exceed a limit, nothing of it counts.
        """
        kept, most, gone, goes = states[_KEPT], states[_MOST], states[_GONE], self._goes
        highest = np.minimum(kept + self._most_kept[block], most)
        may_exceed = self._each * highest - goes * (gone - self._come[block])
        may_exceed = may_exceed > self._lowest[:, [block]]
        here = self._each * kept - goes * gone
        rows = [here]
        if (size := states[_SIZE]).any():
            # Of blocks behind that the section keeps more of: as it is, and where none is left.
            least = np.maximum(0.0, size - self._left[block])
            rows += [here - goes * least, here - goes * size]
        rows = [_where(may_exceed, row) for row in rows]
        binds = (most - kept < self._most_kept[block])[None]
        return np.concatenate([*rows, _where(binds, (kept - most)[None])])

    def _followed(self, place: int) -> Places:
        """The kinds of a choice for all blocks."""
        number, found = self._problem.seconds.shape[1], []
        for places in reversed(self._steps):
            place, kind = divmod(int(places[place]), number)
            found.append(kind)
        return np.array(found, dtype=np.intp)


def _where(counts: NDArray[np.bool_], sizes: Floats) -> Floats:
    """Sizes by row that count, and less than all of them where they do not."""
    least = np.where(counts, sizes, np.inf).min(axis=1)[:, None]
    found: Floats = np.where(counts, sizes, np.where(np.isfinite(least), least, 0.0) - 1.0)
    return found


def _before(of_blocks: Floats) -> Floats:
    """Sums over the blocks before each, the last axis."""
    sums = of_blocks.cumsum(axis=-1)
    return np.concatenate([np.zeros_like(sums[..., :1]), sums], axis=-1)


def _some(kept: Floats, least_s: Floats, places: Places, number: int) -> tuple[Places, float]:
    """As many of some choices as said, and what those that are dropped take at the least."""
    if len(places) <= number:
        return places, np.inf
    places = places[kept[places].argsort(kind="stable")]
    group = np.arange(len(places)) * number // len(places)  # of those that keep alike much
    order = np.lexsort((least_s[places], group))
    is_first = np.append(True, np.diff(group) > 0)
    return places[order[is_first]], float(least_s[places[order[~is_first]]].min())
