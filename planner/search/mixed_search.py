"""One configuration whose stages run on several kinds of device.

Each stage is a run of units as on its own kind (``ConfigurationSearch.at``), with the memory and
the links of that kind: what is fast there takes more of them. Sums over units that belong to no
stage yet take each unit on the kind where it takes least.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from planner.cost.kinds import CostsOfKinds
from planner.pricing.model_pricing import LaidOut
from planner.search.bounds import least_of_kinds_s
from planner.search.columns import Column
from planner.search.configuration_search import ConfigurationSearch
from planner.search.even_cut import nearest_cut


class MixedSearch(ConfigurationSearch):
    """Runs of units, columns and bounds; one stage on each rank."""

    def __init__(
        self, by_kind: Sequence[ConfigurationSearch], kind_of_stage: Sequence[int]
    ) -> None:
        """Bound what no cut avoids.

        Args:
            by_kind: The configuration as though all devices were of each kind.
            kind_of_stage: Place of its kind among them, by stage.
        """
        first = by_kind[0]
        self._by_kind = by_kind
        self._kind_of_stage = kind_of_stage
        super().__init__(first.configuration, first.priced, first.table, first.maker)
        self.once_s = first.table.framework.step_s
        self.transfers_s = [
            self.at(stage).transfers_s[stage] for stage in range(self.configuration.num_stages)
        ]
        self.parts_s = self.least_parts_s(0, self.num_units)
        units_s = np.array([_units_s(self.at(stage)) for stage in range(len(kind_of_stage))])
        self.bound_s = self.once_s + least_of_kinds_s(self.configuration, units_s, self.transfers_s)

    def at(self, stage: int) -> ConfigurationSearch:
        """The same on the kind of device that a stage runs on."""
        return self._by_kind[self._kind_of_stage[stage]]

    @property
    def num_near(self) -> int:
        """Those of all kinds of device."""
        return sum(each.num_near for each in self._by_kind)

    @property
    def share_off(self) -> float:
        """The most of any kind of device."""
        return max(each.share_off for each in self._by_kind)

    @property
    def costs(self) -> CostsOfKinds:
        """Prices of its stages."""
        return CostsOfKinds([each.table for each in self._by_kind], self._kind_of_stage)

    def laid_out(self, columns: Sequence[Column]) -> list[LaidOut]:
        """Layouts of the units of a choice of columns, kind of device by kind."""
        found = []
        for kind, search in enumerate(self._by_kind):
            held = [c for c, at in zip(columns, self._kind_of_stage, strict=True) if at == kind]
            units = range(held[0].first, held[-1].end)
            found.append(LaidOut(priced=search.priced, units=units))
        return found

    # -- a stage: as on its kind ------------------------------------------------------------------

    def column(self, stage: int, first: int, end: int) -> Column | None:
        """The fastest column of a stage, None where none fits."""
        return self.at(stage).column(stage, first, end)

    def fits_alone(self, stage: int, first: int, end: int) -> bool:
        """Whether a stage can be this run."""
        return self.at(stage).fits_alone(stage, first, end)

    def kind_of_stage(self, stage: int) -> int:
        """The first stage on the same kind of device that is like it."""
        kind = self._kind_of_stage[stage]
        return kind * self.configuration.num_stages + self.at(stage).kind_of_stage(stage)

    def leanest(self, stage: int, first: int, end: int) -> Column:
        """The column of a run that keeps the least."""
        return self.at(stage).leanest(stage, first, end)

    def exceeds_memory(
        self, stage: int, first: int, end: int, *, received: int | None = None
    ) -> bool:
        """Whether no run that begins at ``first`` and ends at ``end`` or later fits its device."""
        return self.at(stage).exceeds_memory(stage, first, end, received=received)

    def last_held(self, stage: int, first: int) -> int:
        """The last end of a run from ``first`` on that does not exceed its device's memory."""
        return self.at(stage).last_held(stage, first)

    def furthest_end(self, stage: int, first: int, *, near: int) -> int:
        """Where no run can end later that begins at ``first`` or earlier."""
        return self.at(stage).furthest_end(stage, first, near=near)

    def fits(self, rank: int, held: Sequence[Column]) -> bool:
        """Whether a rank can hold its stage."""
        return self.at(rank).fits(rank, held)

    # -- sums over units, whatever stage they are in ----------------------------------------------

    def least_s(self, first: int, end: int) -> float:
        """A run on the kinds of device where its units take least."""
        return self._least_all_s[end] - self._least_all_s[first]

    def least_forward_s(self, first: int, end: int) -> float:
        """The forward part, where that takes least."""
        return self._least_parts_s[0][end] - self._least_parts_s[0][first]

    def least_parts_s(self, first: int, end: int) -> tuple[float, float, float]:
        """Each part where it takes least."""
        forward_s, input_s, weight_s = (sums[end] - sums[first] for sums in self._least_parts_s)
        return forward_s, input_s, weight_s

    @cached_property
    def _least_all_s(self) -> list[float]:
        seconds = np.min([_units_s(each).sum(axis=0) for each in self._by_kind], axis=0)
        return list(accumulate(seconds.tolist(), initial=0.0))

    @cached_property
    def _least_parts_s(self) -> list[list[float]]:
        seconds = np.min([_units_s(each) for each in self._by_kind], axis=0)
        return [list(accumulate(part.tolist(), initial=0.0)) for part in seconds]

    @cached_property
    def stretches(self) -> Sequence[int]:
        """Units that are alike on every kind of device."""
        return [max(starts) for starts in zip(*(e.stretches for e in self._by_kind), strict=True)]

    def even_cut(self) -> list[int]:
        """Boundaries that give each stage units by the speed of its device."""
        before_s = [self._by_kind[0].least_s(0, position) for position in self.positions]
        whole = [1 / self.at(s).least_s(0, self.num_units) for s in range(len(self._kind_of_stage))]
        ends_s = [share * before_s[-1] / sum(whole) for share in accumulate(whole[:-1])]
        return [self.positions[place] for place in nearest_cut(before_s, ends_s)]


def _units_s(search: ConfigurationSearch) -> NDArray[np.float64]:
    """What each unit takes at the least on one kind of device: (part of ``Path.counts``, unit)."""
    whole_s, forward_s, weight_s = (
        np.diff(search.table.before(name)) for name in ("least", "least_forward", "least_weight")
    )
    weight_s *= search.configuration.divides_backward
    return np.array([forward_s, whole_s - forward_s - weight_s, weight_s])
