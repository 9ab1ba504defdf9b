"""The best choice of one configuration, by branching on what holds its steps up.

A solver of integer programs branches on single choices, and to forbid one of hundreds changes
little. What the relaxation (``stage_program``) misses is that units are whole: 82 units on 16 ranks
are 5.125 each in fractions, and some rank must hold 6. So choices are split where a rank's number
of units is no whole one, into at most and at least. Where all are whole, what is missed is that a
stage takes as long as one of its choices, not as their mean: the choices of a part are split into
those that are shorter and longer than the mean in the stage where they differ most. What is open
and has the lowest bound is next, so that the lowest bound of all is that of the configuration.
Choices whose whole would raise the bound over the limit, by their reduced costs, are forbidden.

Where a solution is whole it is a choice of stages, timed by its action list.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from planner.search.columns import Column, Decided, Partition, placed, step_time_s
from planner.search.stage_ilp import TOLERANCE, StageProblem
from planner.search.stage_program import Floats, Fraction, StageProgram
from planner.solver import Effort, NoSolutionError

_WORK = 1_300
"""Choices that solutions look at for one check of ``Effort``."""
_ACTIONS = 10
"""Actions of a list that take as long as one of these."""
_ENOUGH = TOLERANCE / 10
"""Share by which a path is longer than the bound for it to join."""
_STALL_ROUNDS = 6
_LEAST_GAIN = 3e-4
"""Share that the bound must gain in so many rounds for a part not to be split yet; of a whole
solution, of which all paths are wanted, ``_ENOUGH``."""
_WHOLE = 1e-6
"""How far from a whole number a share may be."""

Allowed = NDArray[np.bool_]


def branched(
    problem: StageProblem,
    limit_s: float,
    *,
    fits: Callable[[Sequence[Column]], bool],
    effort: Effort,
) -> Decided:
    """Find the fastest choice below a limit, or how fast it is at the most.

    Args:
        problem: The choices.
        limit_s: Steps that are no faster need not be found.
        fits: The exact check of memory where ranks hold several stages.
        effort: How much work it may be.
    """
    return _Branching(problem, limit_s, fits).run(effort)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """Some choices, of which nothing is decided yet."""

    bound_s: float
    """None of them is faster."""
    allowed: Allowed
    """Choices of all parts."""
    fewest_units: Floats
    """Of each rank."""
    most_units: Floats
    """Of each rank."""


class _Branching:
    def __init__(
        self, problem: StageProblem, limit_s: float, fits: Callable[[Sequence[Column]], bool]
    ) -> None:
        self._problem = problem
        self._program = StageProgram(problem, limit_s)
        self._fits = fits
        self._spreads = [self._program.times_of(part) for part in range(len(problem.choices))]
        self._best: Partition | None = None
        self._limit_s = limit_s
        self._unknown_s = np.inf
        """Bound of single choices that the solver came to no end with."""
        configuration = problem.configuration
        actions = 2 * configuration.num_stages * configuration.num_microbatches
        self._work_of_round = self._program.size + actions // _ACTIONS
        self._work = 0

    def run(self, effort: Effort) -> Decided:
        pp = self._problem.configuration.degrees.pp
        everything = _Open(
            bound_s=0.0,
            allowed=np.ones(self._program.size, dtype=bool),
            fewest_units=np.zeros(pp),
            most_units=np.full(pp, np.inf),
        )
        queue = [(0.0, 0, everything)]
        count = 0
        while queue and queue[0][0] < self._enough_s:
            if self._work > effort.most_checks * _WORK or effort.is_over:
                break
            for part in self._split(heappop(queue)[2]):
                count += 1
                heappush(queue, (part.bound_s, count, part))
        bounds = (bound_s for bound_s, _, _ in queue)
        bound_s = min([self._limit_s, self._unknown_s, *bounds])
        return Decided(partition=self._best, bound_s=bound_s)

    @property
    def _enough_s(self) -> float:
        """What is no faster holds nothing better."""
        return self._limit_s * (1 - TOLERANCE)

    def _split(self, choices: _Open) -> Iterator[_Open]:
        """Yield what is left of some choices, in two parts; nothing where they are decided."""
        try:
            found, bound_s = self._bounded(choices)
        except NoSolutionError:
            return
        bound_s = max(bound_s, choices.bound_s)
        if bound_s >= self._enough_s:
            return
        chosen = np.zeros(self._program.size)
        allowed = choices.allowed
        if found is not None:
            chosen = found.chosen
            spare_s = (self._limit_s - found.bound_s) * (1 + _WHOLE)
            allowed = allowed & ((found.least_more_s <= spare_s) | (chosen > 0))
        left = replace(choices, bound_s=bound_s, allowed=allowed)
        parts = self._by_rank(left, chosen) or self._by_time(left, chosen)
        if not parts and found is None:
            self._unknown_s = min(self._unknown_s, bound_s)
        yield from parts

    def _bounded(self, choices: _Open) -> tuple[Fraction | None, float]:
        """The best choice in fractions where the solver comes to one, and a bound."""
        self._program.restrict(choices.allowed, choices.fewest_units, choices.most_units)
        bounds: list[float] = []
        while True:
            self._work += self._work_of_round
            found = self._program.solve()
            if found is None:
                return None, bounds[-1] if bounds else 0.0
            bounds.append(max(found.bound_s, bounds[-1] if bounds else 0.0))
            before_s = bounds[-1 - _STALL_ROUNDS] if len(bounds) > _STALL_ROUNDS else 0.0
            least_gain = _ENOUGH if _is_whole(found.chosen) else _LEAST_GAIN
            stalls = bounds[-1] < before_s * (1 + least_gain)
            if bounds[-1] >= self._enough_s or stalls or not self._program.tighten(found, _ENOUGH):
                break
        if _is_whole(found.chosen):
            self._take(found.chosen)
        return found, bounds[-1]

    def _take(self, chosen: Floats) -> None:
        """Keep a whole choice, if it is the best."""
        configuration = self._problem.configuration
        stages: dict[int, Column] = {}
        for part, choices in enumerate(self._problem.choices):
            held = choices[int(chosen[self._program.places(part)].argmax())]
            numbers = configuration.stages_of(part) if self._problem.by_rank else (part,)
            stages.update(zip(numbers, held, strict=True))
        columns = placed([stages[stage] for stage in range(configuration.num_stages)])
        if self._fits(columns):
            objective_s = step_time_s(configuration, columns)
            if objective_s < self._limit_s:
                self._best = Partition(columns=columns, objective_s=objective_s)
                self._limit_s = objective_s

    def _by_rank(self, choices: _Open, chosen: Floats) -> list[_Open]:
        """Two parts by the units of the rank whose number is farthest from a whole one."""
        units = self._program.units_of_ranks @ chosen
        off = abs(units - units.round())
        rank = int(off.argmax())
        if off[rank] <= _WHOLE:
            return []
        at_rank = np.arange(len(units)) == rank
        most = np.where(at_rank, np.floor(units[rank]), choices.most_units)
        fewest = np.where(at_rank, np.ceil(units[rank]), choices.fewest_units)
        fewer, more = replace(choices, most_units=most), replace(choices, fewest_units=fewest)
        if self._problem.by_rank:
            below = self._program.units_of_ranks[rank, self._program.places(rank)] <= units[rank]
            return [self._kept(fewer, rank, below), self._kept(more, rank, ~below)]
        return [fewer, more]

    def _by_time(self, choices: _Open, chosen: Floats) -> list[_Open]:
        """Two parts by the time of the stage in which the choices of a part differ most."""
        most, split = 0.0, None
        for part, spread in enumerate(self._spreads):
            mine = chosen[self._program.places(part)]
            if mine.max() >= 1 - _WHOLE:
                continue
            means = spread @ mine
            variances = (spread - means[:, None]) ** 2 @ mine
            widest = int(variances.argmax())
            below = spread[widest] <= means[widest]
            if variances[widest] > most and not below[mine > 0].all():
                most, split = variances[widest], (part, below)
        split = split or self._single(choices.allowed, chosen)
        if split is None:
            return []
        part, below = split
        parts = [self._kept(choices, part, kept) for kept in (below, ~below)]
        return [each for each in parts if each.allowed[self._program.places(part)].any()]

    def _kept(self, choices: _Open, part: int, kept: Allowed) -> _Open:
        """What remains where one part is restricted."""
        allowed = choices.allowed.copy()
        allowed[self._program.places(part)] &= kept
        return replace(choices, allowed=allowed)

    def _single(self, allowed: Allowed, chosen: Floats) -> tuple[int, Allowed] | None:
        """One choice of the first part that has others."""
        for part in range(len(self._spreads)):
            places = self._program.places(part)
            if allowed[places].sum() > 1:
                ranked = np.where(allowed[places], chosen[places], -1.0)
                return part, np.arange(len(ranked)) == ranked.argmax()
        return None


def _is_whole(chosen: Floats) -> bool:
    return bool((np.minimum(chosen, 1 - chosen) <= _WHOLE).all())
