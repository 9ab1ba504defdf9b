"""Configurations that differ only in how many ranks share their state, bounded all at once.

Of dp data-parallel ranks, dp_shard may share the state and dp_replicate hold the same of it:
divisors of dp, as many configurations. All of them have the same stages, the same kernels, the same
traffic between stages and over tp, cp and ep. The relaxation of them shares the state over as many
ranks as any of them does, and moves it in no time. For any choice of stages and recomputations

* it holds no more: what is sharded shrinks with dp_shard, gathered parameters and activations do
  not change with it;
* it takes no longer: traffic adds to kernels what they do not hide. Recomputation hides some of
  it, but never more than there was.

So what it cannot reach, in time or memory, none of them can (``Decision`` asks it first). It is no
plan by itself: where it may be the best, they are looked at one by one.
"""

from collections.abc import Callable, Sequence

from planner.cost.stage_costs import StageCosts
from planner.pricing.model_pricing import PricedModel
from planner.search.column_maker import ColumnMaker
from planner.search.configuration_search import ConfigurationSearch
from planner.strategy.configuration import Configuration


class Relaxation(ConfigurationSearch):
    """The one that bounds several configurations."""

    def __init__(
        self,
        stands_for: Sequence[Configuration],
        priced: PricedModel,
        table: StageCosts,
        maker: ColumnMaker,
        *,
        search: Callable[[Configuration], ConfigurationSearch],
    ) -> None:
        """Keep what it stands for.

        Args:
            stands_for: Configurations that differ in dp_replicate and dp_shard alone.
            priced: What all of them compute.
            table: Prices of ``widest`` of them, without the traffic of its state.
            maker: Its columns.
            search: Prices one of them as it is.
        """
        super().__init__(table.configuration, priced, table, maker)
        self.stands_for = tuple(stands_for)
        self._search = search

    def members(self) -> list[ConfigurationSearch]:
        """What it stands for, no bound of which is below its own."""
        found = [self._search(configuration) for configuration in self.stands_for]
        for search in found:
            search.bound_s = max(search.bound_s, self.bound_s)
        return found


def widest(configurations: Sequence[Configuration]) -> Configuration:
    """The one of which most ranks share the state."""
    return max(configurations, key=lambda configuration: configuration.degrees.dp_shard)
