"""The fastest recomputation of many blocks that differ, within what they may keep.

Block b takes s[b, k] and keeps m[b, k] under its kind k. What it holds for a while beside what is
kept differs between kinds as well: c[b, k] is what all blocks may keep where one of them has it.

    minimise  sum over b of s[b, k(b)]   s.t.   sum over b of m[b, k(b)] <= c[b, k(b)] for every b

Each value v of c is taken for the limit by itself, with the kinds whose own is no lower. Whatever a
byte is worth (w, seconds), no choice takes less than

    sum over b of min over k of (s[b, k] + w m[b, k])  -  w v

and one takes so much more as its kinds cost more than the cheapest at w, and as w times what it
leaves of v. With w of the relaxation in fractions, blocks are gone through in order of what another
kind costs more. Choices that cost more than one that fits are dropped, and those that another
beats. Of many blocks some choice soon comes so close to the bound that nothing more is looked for.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Places = NDArray[np.intp]

_MOST_STATES = 6000
"""Choices for the blocks so far that are kept, of those that keep alike much the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A kind for each block."""

    kinds: Places
    """Their places."""
    seconds: float
    """What they take."""
    least_s: float
    """No choice takes less."""


def fastest(seconds: Floats, kept: Floats, most: Floats, *, tolerance_s: float) -> Choice | None:
    """The fastest choice of kinds within the limits, None where there is none.

    Args:
        seconds: What a block takes, by block and kind.
        kept: What it keeps.
        most: What all may keep together where one has the kind.
        tolerance_s: By how much another choice may be faster.
    """
    limits = np.unique(most)
    allowed = most >= limits[:, None, None]
    fits = np.where(allowed, kept, np.inf).min(axis=2).sum(axis=1) <= limits
    if not fits.any():
        return None
    limits, allowed = limits[fits], allowed[fits]
    least_s, is_known = np.zeros(len(limits)), np.zeros(len(limits), dtype=bool)
    best, best_s, at, worth = np.zeros(0, dtype=np.intp), np.inf, len(limits) - 1, 0.0
    while not is_known[at]:
        is_known[at] = True
        worth, kinds = _relaxed(np.where(allowed[at], seconds, np.inf), kept, float(limits[at]))
        if (taken_s := _sum(seconds, kinds)) < best_s:
            best, best_s = kinds, taken_s
        costs = np.where(allowed, seconds + worth * kept, np.inf).min(axis=2).sum(axis=1)
        least_s = np.maximum(least_s, costs - worth * limits)
        at = int(least_s.argmin())
    bound_s, tried = float(least_s[at]), limits[least_s < best_s - tolerance_s]
    if len(tried):
        costs = np.where(most >= tried[0], seconds + worth * kept, np.inf)
        states = _States(costs, kept, most, worth=worth, limit=float(tried[-1]))
        better, dropped_s = states.better(best_s, tolerance_s)
        bound_s = max(bound_s, dropped_s)
        if better is not None:
            best, best_s = better, _sum(seconds, better)
    return Choice(kinds=best, seconds=best_s, least_s=min(best_s, bound_s))


def _sum(of_kinds: Floats, kinds: Places) -> float:
    """Something of the kinds of all blocks."""
    return float(of_kinds[np.arange(len(kinds)), kinds].sum())


def _relaxed(seconds: Floats, kept: Floats, limit: float) -> tuple[float, Places]:
    """The worth of a byte within one limit, where fractions of kinds count, and kinds that fit.

    It lies between a choice that keeps too much and one that fits, which are closed in on.
    """
    kinds = seconds.argmin(axis=1)
    low_s, much = _sum(seconds, kinds), _sum(kept, kinds)
    if much <= limit:
        return 0.0, kinds
    fitting = np.where(seconds < np.inf, kept, np.inf).argmin(axis=1)
    high_s, little = _sum(seconds, fitting), _sum(kept, fitting)
    while True:
        worth = (high_s - low_s) / (much - little)
        kinds = (seconds + worth * kept).argmin(axis=1)
        taken_s, held = _sum(seconds, kinds), _sum(kept, kinds)
        if taken_s + worth * held >= (low_s + worth * much) * (1 - 1e-12):
            return worth, fitting
        if held > limit:
            low_s, much = taken_s, held
        else:
            high_s, little, fitting = taken_s, held, kinds


class _States:
    """Choices for more and more blocks, the others with their cheapest kinds.

    By what they cost more than the cheapest, what they leave of a limit, and what theirs is lower.
    """

    def __init__(
        self, costs: Floats, kept: Floats, most: Floats, *, worth: float, limit: float
    ) -> None:
        """Order the blocks.

        Args:
            costs: What kinds take, and keep times its worth, by block.
            kept: What they keep.
            most: What all may keep together where one has the kind.
            worth: The worth of a byte.
            limit: What all may keep together in any case.
        """
        least = costs.min(axis=1)
        self._order = np.partition(costs - least[:, None], 1, axis=1)[:, 1].argsort(kind="stable")
        self._costs = (costs - least[:, None])[self._order]
        self._cheapest = costs.argmin(axis=1)[self._order]
        kept = kept[self._order]
        at = np.arange(len(kept)), self._cheapest
        self._changes = kept - kept[at][:, None]
        self._short = np.maximum(0.0, limit - most)[self._order]
        self._worth = worth
        self._limit = limit
        self._left = limit - float(kept[at].sum())
        self._bound_s = float(least.sum()) - worth * limit
        behind = np.append(self._short[at], 0.0)
        self._cheapest_short = np.maximum.accumulate(behind[::-1])[::-1]
        self._steps: list[tuple[Places, Places]] = []

    def better(self, known_s: float, tolerance_s: float) -> tuple[Places | None, float]:
        """Kinds that take less than some do that are known, None where there are none.

        Returns:
            They, and what no choice takes less than.
        """
        best_s, dropped_s = known_s - self._bound_s, np.inf
        more_s, left, short = np.zeros(1), np.array([self._left]), np.zeros(1)
        found: tuple[int, int] | None = None
        rest = self._rest(best_s)
        for block in range(len(self._costs)):
            kinds = np.flatnonzero(self._costs[block] < best_s)
            more_s = np.add.outer(more_s, self._costs[block, kinds]).ravel()
            left = np.subtract.outer(left, self._changes[block, kinds]).ravel()
            short = np.maximum.outer(short, self._short[block, kinds]).ravel()
            fits = left >= np.maximum(short, self._cheapest_short[block + 1])
            taken_s = np.where(fits, more_s + self._worth * left, np.inf)
            at = int(taken_s.argmin())
            if taken_s[at] < best_s:
                best_s, found = float(taken_s[at]), (block, at)
                rest = self._rest(best_s)
            least, most, least_short = rest[:, block + 1]
            short = np.maximum(short, least_short)
            may_be = more_s + self._worth * np.maximum(short, left - most) < best_s - tolerance_s
            may_be &= left - least >= short
            stay, lost_s = _unbeaten(more_s, left, short, self._worth, np.flatnonzero(may_be))
            more_s, left, short = more_s[stay], left[stay], short[stay]
            dropped_s = min(dropped_s, lost_s)
            self._steps.append((kinds, stay))
            if not len(stay):
                break
        least_s = self._bound_s + min(best_s - tolerance_s, dropped_s)
        return None if found is None else self._followed(*found), least_s

    def _rest(self, best_s: float) -> Floats:
        """Of blocks from each on: what they may keep more, at the least and at the most.

        And by how much their limits are lower, at the least.
        """
        is_open = self._costs < best_s
        changes = np.where(is_open, self._changes, 0.0)
        short = np.where(is_open, self._short, np.inf).min(axis=1)
        rest = np.zeros((3, len(changes) + 1))
        rest[0, :-1] = changes.min(axis=1)[::-1].cumsum()[::-1]
        rest[1, :-1] = changes.max(axis=1)[::-1].cumsum()[::-1]
        rest[2, :-1] = np.maximum.accumulate(short[::-1])[::-1]
        return rest

    def _followed(self, last: int, place: int) -> Places:
        """The kinds of a choice that was found with some block, the cheapest of those behind."""
        found = self._cheapest.copy()
        for block in range(last, -1, -1):
            kinds, _ = self._steps[block]
            state, kind = divmod(place, len(kinds))
            found[block] = kinds[kind]
            place = int(self._steps[block - 1][1][state]) if block else 0
        chosen: Places = np.empty_like(found)
        chosen[self._order] = found
        return chosen


def _unbeaten(
    more_s: Floats, left: Floats, short: Floats, worth: float, places: Places
) -> tuple[Places, float]:
    """Places of the choices for some blocks that are gone on with, and what dropped ones cost more.

    Args:
        more_s: What they cost more than the cheapest.
        left: What they leave of the limit.
        short: By how much theirs is lower.
        worth: The worth of a byte.
        places: Those to choose from.
    """
    if not len(places):
        return places, np.inf
    places = places[np.lexsort((more_s[places], -left[places], short[places]))]
    taken_s = (more_s + worth * left)[places]
    # Each limit by itself: what is taken within it is moved below all that was before.
    taken_s[1:] -= (np.diff(short[places]) > 0).cumsum() * (np.ptp(taken_s) + worth)
    is_faster = taken_s[1:] < np.minimum.accumulate(taken_s)[:-1]
    places = places[np.append(True, is_faster)]
    if len(places) <= _MOST_STATES:
        return places, np.inf
    group = np.arange(len(places)) * _MOST_STATES // len(places)  # of those that leave alike much
    order = np.lexsort((more_s[places], group))
    is_first = np.append(True, np.diff(group) > 0)
    return places[order[is_first]], float(more_s[places[order[~is_first]]].min())
