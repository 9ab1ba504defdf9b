"""Good choices of interleaved stages, found without a proof: what others must beat.

Ranks of several stages go through their stages in turns, so that a longer stage holds up those
beside it unless these are as long. Where the even share of a stage is no whole number of units,
stages of one unit more are therefore best neighbours: a window of them, as wide as there are units
left over. Some places of that window are tried. From the best of them units are moved, one at a
time, from stages that the longest path of the action list counts often to such that it counts
seldom, as long as that helps.

On each rank the stage whose next recomputation takes least time takes it, until the rank fits.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from planner.cost.shared_cores import path_of
from planner.search.column_tables import ColumnTable, Floats
from planner.search.columns import Column, Holding, Partition, placed
from planner.search.configuration_search import ConfigurationSearch

_WINDOWS = 4
"""Places of the window that are tried at first."""
_NEAR = 1.1
"""Times a limit that the even cut may take for windows to be tried."""
_ENDS = 6
"""Stages that units are taken from, and given to, in one step."""
_TRIES = 6
"""Moves that are looked at for one that helps."""


class FirstChoices:
    """Choices of stages of one configuration whose ranks hold several."""

    def __init__(self, search: ConfigurationSearch) -> None:
        """Nothing is known yet."""
        self._search = search
        self._pp = search.configuration.degrees.pp
        self._stages = search.configuration.num_stages
        self._positions = set(search.positions)
        self._held: dict[tuple[int, tuple[tuple[int, int], ...]], Holding | None] = {}
        self._tables: dict[int, ColumnTable] = {}
        self._places: dict[tuple[int, ...], NDArray[np.intp]] = {}
        self._moments: dict[int, Floats] = {}
        self._sizes: dict[tuple[int, int, int], Floats] = {}

    def first(self, limit_s: float = float("inf")) -> Partition | None:
        """The best of the even cut and of some windows, None where none fits.

        Args:
            limit_s: Windows are looked at where the even cut is not much slower than this.
        """
        cuts = self._search.even_cut()
        even = [end - first for first, end in pairwise(cuts)]
        found = self._best([even])
        if found is None or found.objective_s < limit_s * _NEAR:
            windows = self._best(self._windows(even[0], even[-1], _WINDOWS))
            both = [each for each in (found, windows) if each is not None]
            found = min(both, key=lambda partition: partition.objective_s, default=None)
        return None if found is None else replace(found, columns=placed(found.columns))

    def better(self, partition: Partition, *, moves: int) -> Partition:
        """What windows and moves of single units make of a choice.

        Args:
            partition: Where to start.
            moves: How many may help.
        """
        lengths = [column.end - column.first for column in partition.columns]
        near = (-1, 0, 1)
        ends = [(lengths[0] + first, lengths[-1] + last) for first in near for last in near]
        windows = (each for first, last in ends for each in self._windows(first, last, 16))
        found = self._best(windows)
        if found is not None and found.objective_s < partition.objective_s:
            partition = found
        for _ in range(moves):
            moved = self._moved(partition)
            if moved is None:
                break
            partition = moved
        return replace(partition, columns=placed(partition.columns))

    def _windows(self, first: int, last: int, most: int) -> Iterator[list[int]]:
        """Lengths of stages, those of one unit more side by side.

        Args:
            first: Units of the first stage.
            last: Units of the last stage.
            most: Places of the window.
        """
        inner = self._stages - 2
        if min(first, last) < 1 or len(self._search.positions) <= self._search.num_units:
            return
        least, more = divmod(self._search.num_units - first - last, inner)
        if least < 1:
            return
        places = range(0, inner - more + 1, max(1, (inner - more) // (most - 1)))
        for place in places:
            middle = [least + (place <= stage < place + more) for stage in range(inner)]
            yield [first, *middle, last]

    def _moved(self, partition: Partition) -> Partition | None:
        """Move a unit to a stage that the longest path counts less, None where none helps."""
        lengths = [column.end - column.first for column in partition.columns]
        weights = self._weights(partition.columns)
        order = np.argsort(weights, kind="stable")
        pairs = sorted(
            (weights[to] - weights[source], int(source), int(to))
            for source in order[::-1][:_ENDS]
            for to in order[:_ENDS]
            if weights[to] < weights[source] and lengths[source] > 1
        )
        for _, source, to in pairs[:_TRIES]:
            moved = list(lengths)
            moved[source] -= 1
            moved[to] += 1
            found = self._of_lengths(moved)
            if found is not None and found.objective_s < partition.objective_s * (1 - 1e-9):
                return found
        return None

    def _weights(self, columns: Sequence[Column]) -> NDArray[np.float64]:
        """Seconds of a unit along the longest path, in each stage."""
        configuration = self._search.configuration
        path = path_of(
            configuration,
            forward_s=[column.forward_s for column in columns],
            backward_s=[column.backward_s for column in columns],
            weight_backward_s=[column.weight_s for column in columns],
        )
        seconds = np.array([column.parts_s for column in columns])
        units = np.array([column.end - column.first for column in columns])
        weights: NDArray[np.float64] = (np.array(path.counts).T * seconds).sum(axis=1) / units
        return weights

    def _best(self, tried: Iterable[list[int]]) -> Partition | None:
        found = [each for lengths in tried if (each := self._of_lengths(lengths)) is not None]
        return min(found, key=lambda partition: partition.objective_s, default=None)

    def _of_lengths(self, lengths: Sequence[int]) -> Partition | None:
        """Stages of some lengths with a recomputation that fits, None where there is none.

        Their columns may stand for alike runs elsewhere.
        """
        cuts = [0, *accumulate(lengths)]
        if any(cut not in self._positions for cut in cuts):
            return None
        chosen: list[Column | None] = [None] * self._stages
        for rank in range(self._pp):
            held = self._holding(rank, cuts)
            if held is None:
                return None
            for stage, column in zip(self._search.configuration.stages_of(rank), held, strict=True):
                chosen[stage] = column
        return self._search.partition([column for column in chosen if column is not None])

    def _holding(self, rank: int, cuts: Sequence[int]) -> Holding | None:
        """What a rank holds, with the recomputation that takes least time and fits."""
        runs = tuple(
            self._search.representative(cuts[stage], cuts[stage + 1])
            for stage in self._search.configuration.stages_of(rank)
        )
        if (rank, runs) not in self._held:
            self._held[rank, runs] = self._fitting(rank, runs)
        return self._held[rank, runs]

    def _at_moments(self, rank: int, at: int, columns: Sequence[Column]) -> Floats:
        """What columns of a rank's stage hold at each of its moments."""
        key = rank, at, id(columns)
        if key not in self._sizes:
            if rank not in self._moments:
                rows = self._search.configuration.moment_rows(rank)
                self._moments[rank] = rows.astype(float)
            if id(columns) not in self._tables:
                self._tables[id(columns)] = ColumnTable(self._search, columns)
            moments, table = self._moments[rank][:, at], self._tables[id(columns)]
            self._sizes[key] = table.held_bytes(moments)
        return self._sizes[key]

    def _fitting(self, rank: int, runs: Sequence[tuple[int, int]]) -> Holding | None:
        search = self._search
        stages = search.configuration.stages_of(rank)
        choices = [search.columns(stage, *run) for stage, run in zip(stages, runs, strict=True)]
        if not all(choices):
            return None
        if sum(each[0].state.reduction_bytes for each in choices) > search.room_bytes:
            return None
        alike = tuple(map(id, choices))
        if alike not in self._places:
            self._places[alike] = _places(choices)
        places = self._places[alike]
        sizes = np.zeros(1)
        for at, columns in enumerate(choices):
            sizes = sizes + self._at_moments(rank, at, columns)[places[:, at]]
        fits = (sizes <= search.room_bytes).all(axis=1)
        if not fits.any():
            return None
        return tuple(each[at] for each, at in zip(choices, places[fits.argmax()], strict=True))


def _places(choices: Sequence[Sequence[Column]]) -> NDArray[np.intp]:
    """Places of a rank's columns, with one recomputation more from row to row."""
    places = [0] * len(choices)
    found = [tuple(places)]
    while True:
        more = [
            (each[place + 1].backward_s - each[place].backward_s, at)
            for at, (each, place) in enumerate(zip(choices, places, strict=True))
            if place + 1 < len(each)
        ]
        if not more:
            return np.array(found)
        places[min(more)[1]] += 1
        found.append(tuple(places))
