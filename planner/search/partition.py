"""The best stages of a configuration with one stage per rank, and a bound on all of them.

Stages are chosen from the front. What is chosen so far is told by three sums: the time of one
microbatch through it, the longest detour of one of its ranks, and the dearest end of a step. The
detour of rank r is what its fill, its drain or the path around it (``planner.search.bounds``) takes
beyond one pass of a microbatch through all stages, so that

    pass + longest detour + dearest end

bounds the step of a partition from below. Where ranks share cores
(``planner.cost.shared_cores``), stages take what they do while others wait, and all work is a bound
beside it, a fourth sum. Of the choices that end at the same unit, those that no other beats in all
sums are kept, as a set: neither memory nor time needs to grow with a run of units. Where there are
many, neighbours are merged into one that is as good as either in each sum; it keeps the bound a
bound.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

from planner.cost.shared_cores import joint_s
from planner.search.columns import Column, Partition
from planner.search.configuration_search import ConfigurationSearch
from planner.search.fitting import may_fit, some_cut_fits
from planner.search.reach import Reach

_MOST_LABELS = 24
"""Choices that are kept for one end."""
_ROUNDING = 1e-6
"""Share of a step by which passes of a microbatch may be taken for equal, at each stage."""
_BALANCING_STEPS = 10
"""Halvings of the longest stage's time."""
_FIRST_SHARE = 0.0005
"""Share beyond the bound by which the first limit lies."""
_GROWTH = 1.5
"""By which it grows with every limit below which there is nothing."""
_LAST_SHARE = 0.02
"""Share beyond which all that may be faster is looked at."""
_MOST_PRICED = 8
"""Complete choices whose action list is run."""
_MOST_NEAR = 300
"""Recomputations of blocks of many kinds that are looked for once a configuration is known to be
slower than the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Label:
    """The stages chosen so far."""

    passing_s: float
    """One microbatch through them."""
    detour_s: float
    """Longest detour of their ranks."""
    once_s: float
    """Dearest end of a step."""
    work_s: float
    """What they take of ``work_path``, 0 where ranks do not share cores."""
    before: "_Label | None"
    """Without the last of them."""
    column: Column | None
    """The last of them."""

    @property
    def least_s(self) -> float:
        """No completion is faster."""
        return joint_s(self.passing_s + self.detour_s, self.work_s) + self.once_s

    def is_beaten(self, other: "_Label") -> bool:
        """Whether one with no longer a pass is as good in the other sums."""
        return (
            other.detour_s <= self.detour_s
            and other.once_s <= self.once_s
            and other.work_s <= self.work_s
        )


def best_partition(search: ConfigurationSearch) -> Partition | None:
    """A good partition, None where none fits; ``search.bound_s`` is a proven bound on all."""
    return Partitions(search, inf).best(inf)


class Partitions:
    """Those of a configuration with one stage per rank that are faster than a limit."""

    def __init__(self, search: ConfigurationSearch, limit_s: float) -> None:
        """Raise ``search.bound_s`` by what is told without looking at choices.

        Args:
            search: The configuration.
            limit_s: Partitions that are no faster than this need not be found.
        """
        self._search = search
        self._limit_s = limit_s
        self._reach: Reach | None = None
        may = may_fit(search)
        self._even = _even(search) if may else None
        if self._even is None and not (may and some_cut_fits(search)):
            search.bound_s = inf
        elif search.configuration.degrees.pp > 1:
            recomputes = self._even is None or _recomputes(self._even)
            self._reach = Reach(search, self._reach_s, recomputes=recomputes)
            search.bound_s = max(search.bound_s, min(self._reach.bound_s, self._reach_s))
        elif self._even is not None:
            search.bound_s = self._even.objective_s

    @property
    def _reach_s(self) -> float:
        """A step that none of interest is slower than."""
        return self._limit_s if self._even is None else min(self._limit_s, self._even.objective_s)

    def best(self, best_s: float) -> Partition | None:
        """The fastest partition that is met, and a bound on all in ``search.bound_s``.

        Args:
            best_s: Step of the best of all configurations that is known.

        Returns:
            None where none is faster than the limit, or none fits.
        """
        if self._reach is None:
            return self._even
        search, reach_s = self._search, self._reach_s
        balanced = None if self._even is None else _balanced(search, self._even)
        if balanced is not None:
            reach_s = min(reach_s, balanced.objective_s)
        partitions = [each for each in (self._even, balanced) if each is not None]
        labels = _found(search, self._reach, reach_s, best_s)
        partitions += [search.partition(_columns(label)) for label in labels[:_MOST_PRICED]]
        return min(partitions, key=lambda p: p.objective_s, default=None)


def _recomputes(partition: Partition) -> bool:
    """Whether some stage runs some of its forward again."""
    return any(column.mix.recompute_s > 0 for column in partition.columns)


def columns_below(search: ConfigurationSearch, limit_s: float) -> list[list[Column]]:
    """Columns of each stage that may be in a step no slower than a limit."""
    stages: list[list[Column]] = []
    reach = Reach(search, limit_s, recomputes=True)
    reach.narrow(limit_s)
    _chosen(reach, limit_s, stages)
    return stages


def _found(
    search: ConfigurationSearch, reach: Reach, limit_s: float, best_s: float
) -> list[_Label]:
    """Choices that may be faster than a limit, the most promising first.

    Low limits are tried first: they leave few choices to look at, and where they leave none at
    all they bound the step. Of a configuration that is slower than the best step so much is not
    asked for.
    """
    search.bound_s = max(search.bound_s, min(reach.bound_s, limit_s))
    search.bound_s = least_s = _reached(reach, search.bound_s, limit_s)
    share, most_near = _FIRST_SHARE, search.num_near + _MOST_NEAR
    labels: list[_Label] | None = []
    while search.bound_s < limit_s and not labels:
        tried_s = least_s * (1 + share) if share <= _LAST_SHARE else limit_s
        tried_s = min(tried_s, limit_s)
        reach.narrow(tried_s)
        labels = _chosen(reach, tried_s, [], most_near if search.bound_s >= best_s else inf)
        if labels is None:
            return []
        search.bound_s = max(search.bound_s, min([tried_s, *(each.least_s for each in labels)]))
        share *= _GROWTH
    return sorted(labels or (), key=lambda label: label.least_s)


def _reached(reach: Reach, bound_s: float, limit_s: float) -> float:
    """A higher bound on partitions below a limit, by what stages take at the least alone.

    Limits below which there is nothing rise faster and faster, then what is between is halved.
    """
    share, tried_s = _FIRST_SHARE, min(limit_s, bound_s * (1 + _FIRST_SHARE))
    while not _may_hold(reach, tried_s):
        if tried_s == limit_s:
            return limit_s
        bound_s, share = tried_s, 2 * share
        tried_s = min(limit_s, bound_s * (1 + share))
    while tried_s > bound_s * (1 + _FIRST_SHARE):
        middle_s = (bound_s + tried_s) / 2
        if _may_hold(reach, middle_s):
            tried_s = middle_s
        else:
            bound_s = middle_s
    return bound_s


def _may_hold(reach: Reach, limit_s: float) -> bool:
    """Whether some partition may be no slower than a limit."""
    reach.narrow(limit_s)
    return reach.bound_s <= limit_s


def _chosen(
    reach: Reach, limit_s: float, used: list[list[Column]], most_near: float = inf
) -> list[_Label] | None:
    """Complete choices that may be no slower than a limit; all their columns are put down.

    Returns:
        None where more recomputations would have to be looked for than these.
    """
    search = reach.search
    start = _Label(
        passing_s=0.0, detour_s=0.0, once_s=search.once_s, work_s=0.0, before=None, column=None
    )
    ends = {0: [start]}
    for stage in range(search.configuration.num_stages):
        used.append([])
        found: dict[int, list[_Label]] = {}
        for first in sorted(ends):
            if search.num_near > most_near:
                return None
            for column, longer in _extended(reach, stage, first, ends[first], limit_s):
                used[-1].append(column)
                found.setdefault(column.end, []).extend(longer)
        ends = {end: _undominated(labels) for end, labels in found.items()}
    return ends.get(search.num_units, [])


def _even(search: ConfigurationSearch) -> Partition | None:
    """The partition nearest to even shares, where it fits."""
    cuts = search.even_cut()
    columns = []
    for stage, (first, end) in enumerate(pairwise(cuts)):
        column = search.column(stage, first, end)
        if column is None:
            return None
        columns.append(column)
    return search.partition(columns)


def _balanced(search: ConfigurationSearch, even: Partition) -> Partition | None:
    """A partition whose longest stage is shorter than that of an even cut, None where none is met.

    Stages are filled from the front up to a time, which is halved in on. Where blocks are of many
    kinds it is closer to the best than the even cut is, and leaves less to look at.
    """
    longest_s = max(column.microbatch_s for column in even.columns)
    shortest_s = search.even_s
    found: Partition | None = None
    for _ in range(_BALANCING_STEPS):
        most_s = (shortest_s + longest_s) / 2
        columns = _filled(search, most_s)
        if columns is None:
            shortest_s = most_s
            continue
        longest_s = max(column.microbatch_s for column in columns)
        better = search.partition(columns)
        if found is None or better.objective_s < found.objective_s:
            found = better
    return found


def _filled(search: ConfigurationSearch, most_s: float) -> list[Column] | None:
    """Stages that take as many units as the time allows, one after the other."""
    columns: list[Column] = []
    first = 0
    for stage in range(search.configuration.num_stages):
        longest: Column | None = None
        for end in reversed(list(search.ends(stage, first, most_s))):
            column = search.column(stage, first, end)
            if column is not None and column.microbatch_s <= most_s:
                longest = column
                break
        if longest is None:
            return None
        columns.append(longest)
        first = longest.end
    return columns


def _extended(
    reach: Reach, stage: int, first: int, labels: Sequence[_Label], limit_s: float
) -> Iterator[tuple[Column, list[_Label]]]:
    """Columns that a stage may add to choices that end at one unit, and what comes of these."""
    promising = reach.ends(
        stage,
        first,
        passing_s=min(label.passing_s for label in labels),
        detour_s=min(label.detour_s for label in labels),
        limit_s=limit_s - min(label.once_s for label in labels),
    )
    for end in promising:
        column = reach.search.column(stage, first, end)
        if column is not None:
            longer = list(_longer(reach, stage, labels, column, limit_s))
            if longer:
                yield column, longer


def _longer(
    reach: Reach, stage: int, labels: Sequence[_Label], column: Column, limit_s: float
) -> Iterator[_Label]:
    """Choices with one more stage, as far as they may be no slower than a limit."""
    rest_s = reach.rest_s(stage + 1, column.end)
    behind_s = reach.detour_s(stage + 1, column.end)
    forward_s, backward_s = reach.share * column.forward_s, reach.share * column.backward_s
    detour_s = reach.detours[stage].longest_s(forward_s, backward_s, rest_s)
    own_work_s = reach.work_s(stage, column)
    rest_work_s = reach.least_work_s(rest_s)
    for label in labels:
        passing_s = label.passing_s + (forward_s + backward_s)
        once_s = max(label.once_s, column.step_s)
        detours_s, work_s = max(label.detour_s, detour_s), label.work_s + own_work_s
        list_s = passing_s + rest_s + max(detours_s, behind_s)
        if joint_s(list_s, work_s + rest_work_s) + once_s <= limit_s * (1 + 1e-9):
            yield _Label(
                passing_s=passing_s,
                detour_s=detours_s,
                once_s=once_s,
                work_s=work_s,
                before=label,
                column=column,
            )


def _undominated(labels: list[_Label]) -> list[_Label]:
    """Labels that no other beats in all sums; neighbours merged where there are many."""
    kept = _front(sorted(labels, key=lambda each: (each.passing_s, each.detour_s, each.once_s)))
    if len(kept) > _MOST_LABELS:
        kept = _front(_rounded(kept))
    while len(kept) > _MOST_LABELS:
        pairs = zip(kept[::2], [*kept[1::2], kept[-1]], strict=False)
        kept = [_merged(one, other) for one, other in pairs]
    return kept


def _front(labels: Sequence[_Label]) -> list[_Label]:
    """Of labels in order of their passes, those that none before beats in the other sums."""
    kept: list[_Label] = []
    for label in labels:
        if not any(label.is_beaten(other) for other in kept):
            kept.append(label)
    return kept


def _rounded(labels: Sequence[_Label]) -> list[_Label]:
    """Labels in order, with passes that hardly differ taken for the shortest of them.

    Blocks of many kinds make passes that differ in their last digits alone: none beats another
    then, and to merge them would lose which detour is whose.
    """
    rounded: list[_Label] = []
    shortest_s = 0.0
    for label in labels:
        if not rounded or label.passing_s > shortest_s + _ROUNDING * label.least_s:
            shortest_s = label.passing_s
        rounded.append(replace(label, passing_s=shortest_s))
    return sorted(rounded, key=lambda each: (each.passing_s, each.detour_s, each.once_s))


def _merged(one: _Label, other: _Label) -> _Label:
    """A label that is as good as either; its stages are those of the one with the lower bound."""
    better = min(one, other, key=lambda label: label.least_s)
    return _Label(
        passing_s=min(one.passing_s, other.passing_s),
        detour_s=min(one.detour_s, other.detour_s),
        once_s=min(one.once_s, other.once_s),
        work_s=min(one.work_s, other.work_s),
        before=better.before,
        column=better.column,
    )


def _columns(label: _Label) -> list[Column]:
    columns: list[Column] = []
    at: _Label | None = label
    while at is not None and at.column is not None:
        columns.append(at.column)
        at = at.before
    return columns[::-1]
