"""Runs of units that stages may be in a step below a limit, told before any of them is priced.

Where blocks all differ there are as many columns as stages times starts times ends, and most are in
no step that matters. What a run takes at the least (nothing exposed, as much recomputed as its
memory asks for at the best rate of a block) is told by sums of its units, so that all runs of a
stage are looked at at once. With t[s, i, j] that of a run from position i to j as stage s:

    rest[s, i]      one microbatch through stages s and later, where stage s starts at i
                    = min over j of t[s, i, j] + rest[s + 1, j]
    least[s, i]     the longest detour (``planner.search.partition``) of these stages
                    = min over j of max(detour of t[s, i, j], least[s + 1, j])

No completion of a choice takes less, nor has a shorter detour, and rest[0, 0] + least[0, 0] bounds
all partitions.
"""

from collections.abc import Iterator
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from planner.search.bounds import paths_of_rank
from planner.search.configuration_search import ConfigurationSearch

Floats = NDArray[np.float64]


class Detours:
    """What the paths of a rank take beyond one pass through all stages, at the least."""

    def __init__(self, search: ConfigurationSearch, stage: int) -> None:
        """Keep the paths that take every other stage once or more."""
        counts = []
        for path in paths_of_rank(search.configuration, stage):
            behind = (*path.forwards[stage + 1 :], *path.backwards[stage + 1 :])
            others = (*path.forwards[:stage], *path.backwards[:stage], *behind)
            if min(others, default=1) >= 1:
                more = min(behind, default=1) - 1
                counts.append((path.forwards[stage] - 1, path.backwards[stage] - 1, more))
        self._counts = tuple(dict.fromkeys(counts))
        """How often more than once a path takes the stage's forward, its backward, and all of each
        stage behind it."""

    def longest_s(self, forward_s: float, backward_s: float, rest_s: float) -> float:
        """The longest of them.

        Args:
            forward_s: The stage's forward.
            backward_s: Its backward.
            rest_s: One microbatch through all stages behind it, at the least.
        """
        return max(
            forwards * forward_s + backwards * backward_s + behind * rest_s
            for forwards, backwards, behind in self._counts
        )

    def longest_of(self, forward_s: Floats, backward_s: Floats, rest_s: Floats) -> Floats:
        """The longest of them for each of many runs."""
        longest_s: Floats = np.max(
            [
                forwards * forward_s + backwards * backward_s + behind * rest_s
                for forwards, backwards, behind in self._counts
            ],
            axis=0,
        )
        return longest_s


class Reach:
    """What stages of one configuration take at the least, and where they may end."""

    def __init__(self, search: ConfigurationSearch, limit_s: float, *, recomputes: bool) -> None:
        """Bound every completion.

        Args:
            search: A configuration with one stage per rank.
            limit_s: Partitions that are no faster are of no interest.
            recomputes: Look at what recomputation adds where memory is short.
        """
        positions, stages = search.positions, search.configuration.num_stages
        self.search = search
        """The configuration."""
        self.detours = [Detours(search, stage) for stage in range(stages)]
        """By stage."""
        self._place = {position: place for place, position in enumerate(positions)}
        self._before_s = np.array([search.least_s(0, each) for each in positions])
        self._forward_before_s = np.array([search.least_forward_s(0, each) for each in positions])
        self._sending_s = np.cumsum([0.0, *search.transfers_s[::-1]])[::-1]
        furthest = np.searchsorted(
            self._before_s, self._before_s + search.slowest_s(limit_s), side="right"
        )
        starts = np.arange(len(positions))[:, None]
        self._runs = starts, starts + np.arange(1, max(2, int((furthest - starts[:, 0]).max())))
        self._recomputed = RunRecomputation(search, *self._runs) if recomputes else None
        self._from: dict[tuple[int, int], tuple[Floats, Floats, Floats]] = {}
        self._rest_s: list[Floats] = []
        self._least: list[Floats] = []
        self._bound_completions()
        self.bound_s = search.once_s + float(self._rest_s[0][0] + self._least[0][0])
        """No partition below the limit is faster."""

    def rest_s(self, stage: int, first: int) -> float:
        """One microbatch through a stage that begins with a unit and all later ones."""
        return float(self._rest_s[stage][self._place[first]])

    def detour_s(self, stage: int, first: int) -> float:
        """The longest detour of a stage that begins with a unit and of all later ones."""
        return float(self._least[stage][self._place[first]])

    def ends(
        self, stage: int, first: int, *, passing_s: float, detour_s: float, limit_s: float
    ) -> Iterator[int]:
        """Where a stage may end in a step no slower than a limit, by time and memory.

        Args:
            stage: The stage.
            first: Where it begins.
            passing_s: One microbatch through the stages before it.
            detour_s: The longest detour of these.
            limit_s: The step less what comes once.
        """
        start = self._place[first]
        if (stage, start) not in self._from:  # asked again under every limit
            row = self._times(stage, slice(start, start + 1))
            self._from[stage, start] = row[0][0], row[1][0], row[2][0]
        taken_s, longest_s, rest_s = self._from[stage, start]
        least_s = passing_s + taken_s + rest_s + np.maximum(longest_s, detour_s)
        may_end = (least_s <= limit_s * (1 + 1e-9)) & (least_s < np.inf)
        last = self.search.last_held(stage, first)
        for at in np.flatnonzero(may_end).tolist():
            end = self.search.positions[start + 1 + at]
            if end > last:
                break
            yield end

    def _times(self, stage: int, rows: slice) -> tuple[Floats, Floats, Floats]:
        """Of runs from some starts as a stage, all at the least.

        Returns:
            What they take, the longest detours of them and of all stages behind (endless where
            there is no run), and what the stages behind take.
        """
        starts, ends = self._runs[0][rows], self._runs[1][rows]
        is_run = ends < len(self._before_s)
        ends = np.minimum(ends, len(self._before_s) - 1)
        sending_s = self.search.transfers_s[stage]
        forward_s = self._forward_before_s[ends] - self._forward_before_s[starts] + sending_s / 2
        taken_s = self._before_s[ends] - self._before_s[starts] + sending_s
        if self._recomputed is not None:
            taken_s = taken_s + self._recomputed.seconds(stage, rows)
        rest_s = self._rest_s[stage + 1][ends]
        longest_s = self.detours[stage].longest_of(forward_s, taken_s - forward_s, rest_s)
        longest_s = np.maximum(longest_s, self._least[stage + 1][ends])
        return taken_s, np.where(is_run, longest_s, np.inf), rest_s

    def _bound_completions(self) -> None:
        """``rest`` and ``least`` of every stage and position."""
        number, stages = len(self._before_s), len(self.detours)
        self._rest_s = [np.zeros(number) for _ in range(stages + 1)]
        self._least = [np.full(number, np.inf) for _ in range(stages + 1)]
        self._least[-1][-1] = 0.0
        for stage in reversed(range(stages)):
            taken_s, longest_s, rest_s = self._times(stage, slice(None))
            self._least[stage] = longest_s.min(axis=1)
            passing_s = np.where(longest_s < np.inf, taken_s + rest_s, np.inf).min(axis=1)
            self._rest_s[stage] = np.where(passing_s < np.inf, passing_s, 0.0)


class RunRecomputation:
    """Recomputation that runs need to fit a rank of their own, at the least.

    A block takes at least so long for each byte that recomputation frees, whatever the kind.
    """

    def __init__(
        self, search: ConfigurationSearch, starts: NDArray[np.intp], ends: NDArray[np.intp]
    ) -> None:
        """Read what runs hold.

        Args:
            search: A configuration with one stage per rank.
            starts: Places where runs start, a column.
            ends: Places where they end, by start; those beyond the last are no runs.
        """
        positions = search.positions
        self._always, self._gradients, self._received = _held(search, ends.shape)
        kept = np.array(_most_kept_before(search))[positions]
        self._kept = kept[np.minimum(ends, len(positions) - 1)] - kept[starts]
        self._freeing_s = _freeing_s(search)
        self._search = search

    def seconds(self, stage: int, rows: slice) -> Floats:
        """What each run from some starts needs as a stage."""
        most: Floats = np.full(self._kept[rows].shape, np.inf)
        for (moment,) in self._search.fullest_moments(stage):
            number = moment.in_flight + moment.waiting
            room = self._search.room_bytes - self._always[rows] + number * self._received[rows]
            room -= moment.has_gradients * self._gradients[rows]
            if number > moment.is_ending:
                most = np.minimum(most, room / (number - moment.is_ending))
        excess: Floats = np.maximum(0.0, self._kept[rows] - np.maximum(0.0, most))
        return self._freeing_s * excess


def _held(search: ConfigurationSearch, shape: tuple[int, int]) -> Floats:
    """What runs hold always, with gradients, and in buffers, by place of their start and length."""
    positions, (_, width) = search.positions, shape
    place = {position: row for row, position in enumerate(positions)}
    held = np.zeros((3, *shape))
    for row, first in enumerate(positions[:-1]):
        start, known = search.stretches[first], 0
        last = search.stretch_ends[start]
        if start < first <= last and place.get(last, 0) - place.get(start, last) == last - start:
            known = min(width, last - first)  # like the runs that begin with the stretch
            held[:, row, :known] = held[:, place[start], :known]
        for column, end in enumerate(positions[row + 1 + known : row + 1 + width], known):
            always, gradients, _, _, received = search.least_held(
                *search.representative(first, end)
            )
            held[:, row, column] = always, gradients, received
    return held


def _most_kept_before(search: ConfigurationSearch) -> list[int]:
    """Activations that the units before each keep where as little as can be is recomputed."""
    fastest = search.maker.kinds[0]
    sizes = (
        unit.activation_bytes[fastest] if 0 < index < search.num_units - 1 else 0
        for index, unit in enumerate(search.table.units)
    )
    return list(accumulate(sizes, initial=0))


def _freeing_s(search: ConfigurationSearch) -> float:
    """Recomputation of a block for each byte that it frees, at the least."""
    fastest, *others = search.maker.kinds
    freed = (
        (search.table.recompute_s(index, kind), sizes[fastest] - sizes[kind])
        for index in range(1, search.num_units - 1)
        for sizes in (search.table.units[index].activation_bytes,)
        for kind in others
    )
    return min((seconds / size for seconds, size in freed if size > 0), default=0.0)
