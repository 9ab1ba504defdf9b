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
all partitions. Where ranks share cores (``planner.cost.shared_cores``), all times here are those
that ranks take while others wait, and all work is one more bound.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from planner.cost.shared_cores import JOINT, joint_s, work_path
from planner.search.bounds import list_paths_of_rank
from planner.search.columns import Column
from planner.search.configuration_search import ConfigurationSearch

Floats = NDArray[np.float64]

_MOST_WORTHS = 32
"""Worths of a byte that bounds of recomputation are told by."""
_NARROWER = 1e-4
"""Share by which a pass of a microbatch must rise for shorter detours to be asked for."""


class Detours:
    """What the paths of a rank take beyond one pass through all stages, at the least."""

    def __init__(self, search: ConfigurationSearch, stage: int) -> None:
        """Keep the paths that take every other stage once or more."""
        counts = []
        for path in list_paths_of_rank(search.configuration, stage):
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
        self.share = search.configuration.waiting_share
        """Share of its time that a rank takes while others wait."""
        self._work_passes = search.configuration.work_passes / self.share
        work = work_path(search.configuration) if self._work_passes else None
        self._work = None if work is None else list(zip(work.forwards, work.backwards, strict=True))
        self.detours = [Detours(search, stage) for stage in range(stages)]
        """By stage."""
        self._place = {position: place for place, position in enumerate(positions)}
        kinds = {id(each): each for each in map(search.at, range(stages))}
        before = {key: _Sums(each) for key, each in kinds.items()}
        longest = max(each.longest_run(search.slowest_s(limit_s)) for each in before.values())
        starts = np.arange(len(positions))[:, None]
        runs = starts, starts + np.arange(1, max(2, longest))
        self._is_none = runs[1] >= len(positions)
        self._ends = np.minimum(runs[1], len(positions) - 1)
        recomputed = {
            key: RunRecomputation(each, *runs) for key, each in kinds.items() if recomputes
        }
        self._forward_s: list[Floats] = []
        self._taken_s: list[Floats] = []
        for stage in range(stages):
            key, transfers_s = id(search.at(stage)), search.transfers_s[stage]
            forward_s, taken_s = before[key].of_runs(self._ends)
            more_s = recomputed[key].seconds(stage) if recomputes else 0.0
            self._forward_s.append(self.share * (forward_s + transfers_s / 2))
            self._taken_s.append(self.share * (taken_s + transfers_s + more_s))
        self._longest_s: list[Floats] = []
        self._rest_s: list[Floats] = []
        self._least: list[Floats] = []
        self._bound_completions(np.inf)
        self._pass_s = float(self._rest_s[0][0])

    @property
    def bound_s(self) -> float:
        """No partition within the limit is faster; endless where there is none."""
        passing_s, detour_s = float(self._rest_s[0][0]), float(self._least[0][0])
        return self.search.once_s + joint_s(passing_s + detour_s, self.least_work_s(passing_s))

    def work_s(self, stage: int, column: Column) -> float:
        """What a stage takes of ``work_path``, 0 where ranks do not share cores."""
        forwards, backwards = self._work[stage] if self._work else (0.0, 0.0)
        return forwards * column.forward_s + backwards * column.backward_s

    def least_work_s(self, passing_s: float) -> float:
        """What stages that one microbatch passes in some time take of ``work_path``."""
        return self._work_passes * passing_s

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
        longest_s = np.maximum(self._longest_s[stage][start], detour_s)
        rest_s = self._rest_s[stage + 1][self._ends[start]]
        all_s = passing_s + self._taken_s[stage][start] + rest_s
        list_s, work_s = all_s + longest_s, self._work_passes * all_s
        least_s = np.maximum(list_s, np.maximum(work_s, JOINT * (list_s + work_s)))
        may_end = (least_s <= limit_s * (1 + 1e-9)) & (least_s < np.inf)
        last = self.search.last_held(stage, first)
        for at in np.flatnonzero(may_end).tolist():
            end = self.search.positions[start + 1 + at]
            if end > last:
                break
            yield end

    def narrow(self, limit_s: float) -> None:
        """Bound completions that are part of a step no slower than a limit.

        No detour is longer there than what the limit leaves beside a pass of a microbatch, which
        takes the longer the fewer runs are left.
        """
        before_s, pass_s = 0.0, self._pass_s
        while pass_s > before_s * (1 + _NARROWER):
            self._bound_completions((limit_s - self.search.once_s) * (1 + 1e-9) - pass_s)
            before_s, pass_s = pass_s, float(self._rest_s[0][0])

    def _bound_completions(self, most_s: float) -> None:
        """``rest`` and ``least`` of every stage and position, without detours longer than some."""
        number, stages = len(self.search.positions), len(self.detours)
        self._rest_s = [np.zeros(number) for _ in range(stages + 1)]
        self._least = [np.full(number, np.inf) for _ in range(stages + 1)]
        self._longest_s = [np.zeros(0)] * stages
        self._least[-1][-1] = 0.0
        for stage in reversed(range(stages)):
            taken_s, rest_s = self._taken_s[stage], self._rest_s[stage + 1][self._ends]
            forward_s = self._forward_s[stage]
            longest_s = self.detours[stage].longest_of(forward_s, taken_s - forward_s, rest_s)
            longest_s = np.maximum(longest_s, self._least[stage + 1][self._ends])
            longest_s[self._is_none | (longest_s > most_s)] = np.inf
            self._longest_s[stage], self._least[stage] = longest_s, longest_s.min(axis=1)
            passing_s = np.where(longest_s < np.inf, taken_s + rest_s, np.inf).min(axis=1)
            self._rest_s[stage] = np.where(passing_s < np.inf, passing_s, 0.0)


class _Sums:
    """What the units before each position take at the least on one kind of device."""

    def __init__(self, search: ConfigurationSearch) -> None:
        self._all_s = np.array([search.least_s(0, each) for each in search.positions])
        self._forward_s = np.array([search.least_forward_s(0, each) for each in search.positions])

    def longest_run(self, slowest_s: float) -> int:
        """Positions from the start of the longest run that takes no longer, the next one's too."""
        furthest = np.searchsorted(self._all_s, self._all_s + slowest_s, side="right")
        return int((furthest - np.arange(len(self._all_s))).max())

    def of_runs(self, ends: NDArray[np.intp]) -> tuple[Floats, Floats]:
        """Forward and all of runs that begin with each position, by their ends."""
        forward_s: Floats = self._forward_s[ends] - self._forward_s[:, None]
        taken_s: Floats = self._all_s[ends] - self._all_s[:, None]
        return forward_s, taken_s


class RunRecomputation:
    """Recomputation that runs need to fit a rank of their own, at the least.

    With e the bytes by which a run keeps too much, block b frees f[b, k] of them for s[b, k]
    seconds where it recomputes k. Whatever w a byte is worth, no choice takes less than

        w e - sum over b of max over k of (w f[b, k] - s[b, k])

    since what is freed adds up to e. Several worths are asked; their sums are prefix sums.
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
        self._search = search
        self._always, self._gradients, self._received = _held(search, ends.shape)
        ends = np.minimum(ends, len(search.positions) - 1)
        blocks = search.maker.many.blocks
        kept = _before(search, blocks.kept[:, 0])
        self._kept = kept[ends] - kept[starts]
        seconds, freed = blocks.seconds - blocks.seconds[:, :1], blocks.kept[:, :1] - blocks.kept
        self._worths = _worths(seconds, freed)
        before = [_before(search, (w * freed - seconds).max(axis=1)) for w in self._worths]
        self._gained = [gained[ends] - gained[starts] for gained in before]

    def seconds(self, stage: int) -> Floats:
        """What each run needs as a stage."""
        most: Floats = np.full(self._kept.shape, np.inf)
        for (moment,) in self._search.fullest_moments(stage):
            number = moment.in_flight + moment.waiting
            room = self._search.room_bytes - self._always + number * self._received
            room -= moment.has_gradients * self._gradients
            if number > moment.is_ending:
                most = np.minimum(most, room / (number - moment.is_ending))
        excess: Floats = self._kept - np.maximum(0.0, most)
        least: Floats = np.zeros(excess.shape)
        if (excess > 0).any():
            for worth, gained in zip(self._worths, self._gained, strict=True):
                np.maximum(least, worth * excess - gained, out=least)
        return least


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


def _before(search: ConfigurationSearch, of_blocks: Floats) -> Floats:
    """Sums of something of blocks, before each position."""
    sums = np.concatenate([[0.0, 0.0], np.cumsum(of_blocks)])
    found: Floats = np.append(sums, sums[-1])[search.positions]
    return found


def _worths(seconds: Floats, freed: Floats) -> list[float]:
    """Seconds that a byte may be worth: some of those for which blocks free one.

    Args:
        seconds: What recomputations add, by block.
        freed: Bytes that they free.
    """
    pays = freed > 0
    found = np.unique(seconds[pays] / freed[pays])
    places = np.linspace(0, len(found) - 1, min(len(found), _MOST_WORTHS)).astype(int)
    worths: list[float] = found[places].tolist()
    return worths
