"""Configurations whose layouts are not chosen yet, bounded by what larger microbatches take.

To choose layouts takes longer than all else, and most choices are hopeless: matrices split over
links between nodes, say. A prospect holds the configurations of one choice. No pipeline is faster
than the passes that none of its cuts avoids (``bounds.least_passes``), each of a microbatch that
takes what ``LeastWork`` knows. The decision asks it again as more is known, and has it priced where
it may be among the best.
"""

from collections.abc import Callable, Iterator, Sequence

from planner.pricing.choice import ShardingChoice
from planner.pricing.least_work import LeastWork
from planner.search.bounds import least_passes
from planner.search.configuration_search import ConfigurationSearch
from planner.strategy.configuration import Configuration

Group = Sequence[Configuration]
"""Configurations that are priced together: they differ in dp_shard alone."""


class Prospect:
    """The configurations of one choice of layouts."""

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        choice: ShardingChoice,
        least_work: LeastWork | None,
        once_s: float,
        price: Callable[[Group], Iterator[ConfigurationSearch]],
    ) -> None:
        """Keep what bounds and prices them; nothing is asked yet.

        Args:
            groups: The configurations.
            choice: Theirs.
            least_work: What a microbatch takes at the least, None where nothing tells it.
            once_s: What comes once per step, at the least.
            price: Prices a group.
        """
        self._groups = groups
        self.choice = choice
        """Theirs."""
        self._least_work = least_work
        self._known_s = 0.0
        self._is_solved = False
        self._once_s = once_s
        self._price = price
        self._passes = min(least_passes(group[0]) for group in groups)
        self.stands_for: tuple[Configuration, ...] = tuple(
            configuration for group in groups for configuration in group
        )
        """All of them."""
        self.bound_s = once_s
        """None of them is faster."""

    def sharpen(self) -> bool:
        """Raise the bound: by what the host issues, by larger microbatches, then by a program.

        Returns:
            Whether it rose.
        """
        if self._least_work is None or self._is_solved:
            return False
        if self._rises(self._least_work.issued_s(self.choice)):
            return True
        if self._rises(self._least_work.by_larger_s(self.choice)):
            return True
        self._is_solved = True
        return self._rises(self._least_work.solved_s(self.choice))

    def _rises(self, seconds: float) -> bool:
        is_news = seconds > self._known_s
        self._known_s = max(self._known_s, seconds)
        self.bound_s = max(self.bound_s, self._once_s + self._passes * self._known_s)
        return is_news

    def searches(self) -> list[ConfigurationSearch]:
        """All of them with prices, but for those that have no layout."""
        found: list[ConfigurationSearch] = []
        for group in self._groups:
            least_s = self._once_s + least_passes(group[0]) * self._known_s
            for search in self._price(group):
                search.bound_s = max(search.bound_s, least_s)
                found.append(search)
        return found
