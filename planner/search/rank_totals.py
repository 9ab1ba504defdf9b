"""Whether ranks of several stages can add up to the model in a step below a limit.

Most configurations that are asked for hold nothing in time. What numbers of units each rank may
hold (``rank_units``) tells that before anything is listed: their sums do not reach all units.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from planner.search.bounds import counts_by_rank
from planner.search.column_tables import ColumnTable
from planner.search.columns import Column
from planner.search.configuration_search import ConfigurationSearch
from planner.search.rank_units import PossibleUnits, StageChoices, possible_units


def adds_up(
    search: ConfigurationSearch, stages: Sequence[Sequence[Column]], limit_s: float
) -> bool:
    """Whether the ranks may hold the model in a step no slower than the limit.

    Args:
        search: A configuration whose columns stand for all runs of their length.
        stages: Columns of each stage, at least one.
        limit_s: The limit.
    """
    sums = {0}
    for held in _RankTotals(search, stages, limit_s).possible():
        for rank in range(held.more.shape[1]):
            sums = {before + units for units in held.of(rank) for before in sums}
    return search.num_units in sums


class _RankTotals:
    """Units that ranks may hold when others take their least.

    Along a path of a rank, the stages of other ranks take their fastest columns; what the model
    takes more than these and the rank's own is theirs too, and counts where it counts least.
    """

    def __init__(
        self, search: ConfigurationSearch, stages: Sequence[Sequence[Column]], limit_s: float
    ) -> None:
        configuration = search.configuration
        self._search = search
        self._stages = stages
        self._mine = np.array([configuration.stages_of(r) for r in range(configuration.degrees.pp)])
        self._tables = {id(columns): ColumnTable(search, columns) for columns in stages}
        self._moments = configuration.some_moments
        self._counts = counts_by_rank(configuration)
        pp, num_stages = len(self._mine), len(stages)
        is_other = np.ones((pp, num_stages))
        np.put_along_axis(is_other, self._mine, 0.0, axis=1)
        others = np.where(is_other[:, None, None, :] > 0, self._counts, np.inf)
        self._fewest = others.min(axis=3)
        least = np.array([self._tables[id(columns)].seconds.min(axis=0) for columns in stages])
        rest_s = np.array(search.rest_s(())) - is_other @ least
        others_s = np.einsum("rpas,sa,rs->rp", self._counts, least, is_other)
        others_s += np.einsum("rpa,ra->rp", self._fewest, rest_s)
        self._most_s = limit_s * (1 + 1e-9) - search.once_s - others_s

    def possible(self) -> Iterator[PossibleUnits]:
        """Of ranks whose stages choose from the same columns, all at once."""
        alike: dict[tuple[int, ...], list[int]] = {}
        for rank, mine in enumerate(self._mine.tolist()):
            alike.setdefault(tuple(id(self._stages[stage]) for stage in mine), []).append(rank)
        return map(self._of, alike.values())

    def _of(self, ranks: Sequence[int]) -> PossibleUnits:
        return possible_units(
            [self._choices(ranks, at) for at in range(self._mine.shape[1])],
            most_s=self._most_s[ranks],
            room_bytes=self._search.room_bytes,
        )

    def _choices(self, ranks: Sequence[int], at: int) -> StageChoices:
        """The stages at one place of ranks."""
        stages = self._mine[ranks, at]
        table = self._tables[id(self._stages[stages[0]])]
        seconds = np.einsum("ca,rpa->rcp", table.seconds, self._counts[ranks, :, :, stages])
        seconds -= np.einsum("ca,rpa->rcp", table.own_s, self._fewest[ranks])
        moments = self._moments[ranks, :, at]
        held = table.held_bytes(moments.reshape(-1, moments.shape[-1]))
        sizes = np.moveaxis(held.reshape(-1, *moments.shape[:2]), 0, 1)
        return StageChoices(lengths=table.lengths, seconds=seconds, sizes=sizes)
