"""What a rank can hold that has several stages: all their columns at once.

Where inner runs are alike, a stage is told by its length and its recomputation, wherever it lies,
so that the choices of one rank can be listed without the others': those that fit its memory, in a
step that may beat the limit. Memory is then no matter of the ILP, whose relaxation would mix a
column that fits too well with one that does not fit.

Most configurations that are asked for hold nothing in time. Whether the ranks can add up to the
model at all is told beforehand by a relaxation (``rank_totals``).

Of two choices with stages of the same lengths, one that is no slower in any stage is enough: no
path through the action list, and no rank's end, prefers the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from planner.search.bounds import paths_of_rank
from planner.search.column_tables import ColumnTable
from planner.search.columns import Column, Holding
from planner.search.configuration_search import ConfigurationSearch
from planner.search.rank_totals import adds_up

_MOST_LISTED = 50_000
"""Choices of the first stages of a rank that are looked at at once."""

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


def holdings(
    search: ConfigurationSearch, stages: Sequence[Sequence[Column]], limit_s: float
) -> list[list[Holding]] | None:
    """What each rank can hold in a step no slower than the limit.

    Args:
        search: A configuration whose columns stand for all runs of their length.
        stages: Columns of each stage, at least one.
        limit_s: Steps that are slower need not be found.

    Returns:
        Choices by rank, all empty from a rank on that can hold none; None where there are too
        many to list.
    """
    found: list[list[Holding]] = [[] for _ in range(search.configuration.degrees.pp)]
    listings = _listings(search, stages, limit_s)
    if listings is None:
        return found
    for rank, listing in enumerate(listings):
        listed = listing.run()
        if listed is None:
            return None
        if not listed:
            break
        found[rank] = listed
    return found


def _listings(
    search: ConfigurationSearch, stages: Sequence[Sequence[Column]], limit_s: float
) -> "list[_Listing] | None":
    """The ranks' choices, None where what ranks may hold cannot add up to the model in time."""
    if limit_s < float("inf") and not adds_up(search, stages, limit_s):
        return None
    pp = search.configuration.degrees.pp
    tables: dict[int, ColumnTable] = {}
    listings: list[_Listing] = []
    for rank in range(pp):
        columns_of = [stages[stage] for stage in search.configuration.stages_of(rank)]
        for columns in columns_of:
            if id(columns) not in tables:
                tables[id(columns)] = ColumnTable(search, columns)
        mine = [tables[id(columns)] for columns in columns_of]
        listing = _Listing(search, mine, rank, limit_s)
        if not listing.may_fit():
            return None
        listings.append(listing)
    return listings


@dataclass(slots=True)
class _Choices:
    """Choices of the first stages of a rank, a row each."""

    places: NDArray[np.intp]
    """Column of each stage."""
    seconds: Floats
    """Along each path."""
    own_s: Floats
    """``ConfigurationSearch.least_parts_s`` of its units."""
    sizes: Floats
    """Bytes held at each moment."""
    reductions: Floats
    """Bytes when gradients are reduced after backward."""

    def only(self, kept: Flags) -> "_Choices":
        return _Choices(*(getattr(self, field.name)[kept] for field in fields(self)))


class _Listing:
    """The choices of one rank, extended stage by stage."""

    def __init__(
        self,
        search: ConfigurationSearch,
        tables: Sequence[ColumnTable],
        rank: int,
        limit_s: float,
    ) -> None:
        stages, mine = search.configuration.num_stages, search.configuration.stages_of(rank)
        self._search = search
        self._most_s = limit_s * (1 + 1e-9) - search.once_s
        self._tables = tables
        paths = paths_of_rank(search.configuration, rank)
        self._counts = np.array([path.counts for path in paths], dtype=float)
        self._others = [stage for stage in range(stages) if stage not in mine]
        moments = search.configuration.moment_rows(rank).astype(float)
        self._stages = [
            _Choices(
                places=np.arange(len(table.columns))[:, None],
                seconds=table.path_s(self._counts[:, :, stage]),
                own_s=table.own_s,
                sizes=table.held_bytes(moments[:, at]),
                reductions=table.reductions,
            )
            for at, (stage, table) in enumerate(zip(mine, self._tables, strict=True))
        ]

    def run(self) -> list[Holding] | None:
        """All choices, none of which makes another needless; None where there are too many."""
        found, *others = self._stages
        for at, stage in enumerate(others, start=1):
            found = self._promising(found, at)
            if len(found.places) * len(stage.places) > _MOST_LISTED:
                return None
            found = _extended(found, stage)
        found = self._promising(found, len(self._stages))
        found = found.only(self._leaves_enough(found) & self._fits(found))
        by_stage = list(zip(self._tables, found.places.T, strict=True))
        kept = _undominated(
            np.column_stack([table.lengths[places] for table, places in by_stage]),
            np.column_stack([table.every_s[places] for table, places in by_stage]),
        )
        return [
            tuple(table.columns[at] for table, at in zip(self._tables, row, strict=True))
            for row in found.places[kept]
        ]

    def may_fit(self) -> bool:
        """Whether the rank has room for the least of each stage."""
        sizes = np.sum([stage.sizes.min(axis=0) for stage in self._stages], axis=0)
        return bool((sizes <= self._search.room_bytes).all())

    def _promising(self, found: _Choices, at: int) -> _Choices:
        """Those within time and memory when the stages from ``at`` on take their least."""
        later = self._stages[at:]
        seconds = found.seconds + _least([stage.seconds for stage in later])
        sizes = found.sizes + _least([stage.sizes for stage in later])
        within = np.all(seconds <= self._most_s, axis=1)
        return found.only(within & np.all(sizes <= self._search.room_bytes, axis=1))

    def _fits(self, found: _Choices) -> Flags:
        """``ConfigurationSearch.fits`` for each choice."""
        room_bytes = self._search.room_bytes
        fits: Flags = np.all(found.sizes <= room_bytes, axis=1)
        return fits & (found.reductions <= room_bytes)

    def _leaves_enough(self, found: _Choices) -> Flags:
        """Whether the other ranks can do the rest in time.

        Along the paths of this rank the rest counts where it counts least. And one of the others
        has its even share of the rest to do, for every microbatch.
        """
        configuration = self._search.configuration
        whole = np.array(self._search.rest_s(()))
        rest = np.maximum(0.0, whole - found.own_s)
        share_s = rest.sum(axis=1) / (configuration.degrees.pp - 1)
        enough: Flags = configuration.rank_passes * share_s <= self._most_s
        fewest = self._counts[:, :, self._others].min(axis=2)
        for so_far, least in zip(found.seconds.T, fewest, strict=True):
            enough &= so_far + rest @ least <= self._most_s
        return enough


def _extended(found: _Choices, stage: _Choices) -> _Choices:
    """Every choice with every column of the next stage."""
    before = np.repeat(np.arange(len(found.places)), len(stage.places))
    added = np.tile(np.arange(len(stage.places)), len(found.places))
    return _Choices(
        places=np.column_stack([found.places[before], added]),
        seconds=found.seconds[before] + stage.seconds[added],
        own_s=found.own_s[before] + stage.own_s[added],
        sizes=found.sizes[before] + stage.sizes[added],
        reductions=found.reductions[before] + stage.reductions[added],
    )


def _least(later: Sequence[Floats]) -> Floats | float:
    """What the stages to come take at the least, along each path or at each moment."""
    return sum((each.min(axis=0) for each in later), np.zeros(()))


def _undominated(lengths: NDArray[np.int64], seconds: Floats) -> NDArray[np.intp]:
    """Choices that no other with the same lengths beats in every stage.

    Args:
        lengths: Units of each stage, a row for each choice.
        seconds: What must be no slower, beside them.

    Returns:
        Places of their rows, those of the same lengths side by side, the fastest first.
    """
    by_lengths: dict[bytes, list[int]] = {}
    for at in np.argsort(seconds.sum(axis=1), kind="stable").tolist():
        by_lengths.setdefault(lengths[at].tobytes(), []).append(at)
    return np.array([at for alike in by_lengths.values() for at in _front(alike, seconds)], int)


def _front(places: Sequence[int], seconds: Floats) -> list[int]:
    """Those of which none before is as fast in all."""
    kept = np.empty((len(places), seconds.shape[1]))
    found: list[int] = []
    for at in places:
        if not (kept[: len(found)] <= seconds[at]).all(axis=1).any():
            kept[len(found)] = seconds[at]
            found.append(at)
    return found
