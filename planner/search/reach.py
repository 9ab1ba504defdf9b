"""Runs of units that stages may be in a step below a limit, told before any of them is priced.

Where blocks all differ there are as many columns as stages times starts times ends, and most are in
no step that matters. What a run takes at the least (nothing recomputed, nothing exposed) is a
difference of two sums, so that all runs of a stage are looked at at once:

    least[s, i]     the longest detour (``planner.search.partition``) of stages s and later, where
                    stage s starts at position i and all are cut as well as can be
                    = min over j of max(detour[s, i, j], least[s + 1, j])

No completion of a choice has a shorter detour. ``least[0, 0]`` bounds all partitions.
"""

from collections.abc import Iterator

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

    def __init__(self, search: ConfigurationSearch, limit_s: float) -> None:
        """Bound every completion.

        Args:
            search: A configuration with one stage per rank.
            limit_s: Partitions that are no faster are of no interest.
        """
        positions, stages = search.positions, search.configuration.num_stages
        self.search = search
        """The configuration."""
        self._place = {position: place for place, position in enumerate(positions)}
        self._before_s = np.array([search.least_s(0, each) for each in positions])
        self._forward_before_s = np.array([search.least_forward_s(0, each) for each in positions])
        self._sending_s = np.cumsum([0.0, *search.transfers_s[::-1]])[::-1]
        self.detours = [Detours(search, stage) for stage in range(stages)]
        """By stage."""
        slowest_s = search.slowest_s(limit_s)
        furthest = np.searchsorted(self._before_s, self._before_s + slowest_s, side="right") - 1
        most = int((furthest - np.arange(len(positions))).max(initial=1))
        self._least = self._completions(max(1, most))
        self.bound_s = search.once_s + self.rest_s(-1, 0) + float(self._least[0][0])
        """No partition below the limit is faster."""

    def rest_s(self, stage: int, end: int) -> float:
        """One microbatch through all stages behind one that ends with a unit, at the least."""
        place = self._place[end]
        return float(self._before_s[-1] - self._before_s[place] + self._sending_s[stage + 1])

    def least_detour_s(self, stage: int, first: int) -> float:
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
        ends = np.arange(start + 1, len(self._before_s))
        taken_s, longest_s = self._times(stage, np.array([start]), ends)
        behind = self._least[stage + 1][ends]
        longest_s = np.maximum(np.maximum(longest_s, behind), detour_s)
        rest_s = self._before_s[-1] - self._before_s[ends] + self._sending_s[stage + 1]
        least_s = passing_s + taken_s + rest_s + longest_s
        fits = least_s <= limit_s * (1 + 1e-9)
        for at in np.flatnonzero(fits).tolist():
            end = self.search.positions[start + 1 + at]
            if self.search.exceeds_memory(stage, first, end):
                break
            recompute_s = self.search.least_recompute_s(stage, first, end)
            if least_s[at] + recompute_s <= limit_s * (1 + 1e-9):
                yield end

    def _times(
        self, stage: int, starts: NDArray[np.intp], ends: NDArray[np.intp]
    ) -> tuple[Floats, Floats]:
        """What runs take as a stage, and their longest detours, at the least."""
        sending_s = self.search.transfers_s[stage]
        taken_s = self._before_s[ends] - self._before_s[starts] + sending_s
        forward_s = self._forward_before_s[ends] - self._forward_before_s[starts] + sending_s / 2
        rest_s = self._before_s[-1] - self._before_s[ends] + self._sending_s[stage + 1]
        return taken_s, self.detours[stage].longest_of(forward_s, taken_s - forward_s, rest_s)

    def _completions(self, most: int) -> list[Floats]:
        """``least`` of every stage and position, with stages of so many positions at most."""
        number = len(self._before_s)
        starts = np.arange(number)[:, None]
        ends = starts + np.arange(1, most + 1)
        is_run = ends < number
        ends = np.minimum(ends, number - 1)
        at_end = np.full(number, np.inf)
        at_end[-1] = 0.0
        least = [at_end]
        for stage in reversed(range(len(self.detours))):
            _, longest_s = self._times(stage, starts, ends)
            longest_s = np.where(is_run, np.maximum(longest_s, least[-1][ends]), np.inf)
            least.append(longest_s.min(axis=1))
        return least[::-1]
