"""Looking at configurations, lowest bound first: a bound each, and what is found at first sight.

Those whose layouts are not chosen yet (``prospects``) are priced where they may be among the best.
Of a configuration with one stage per rank the best cut is looked for (``partition``), of one with
several a first choice (``first_choices``). Where a bound rises above that of the next
configuration, that one is looked at first: nothing is searched of what a bound alone tells to be
slower.

Configurations that differ only in how many ranks share their state have a common bound
(``relaxation``), and are looked at one by one only where it tells too little.

Other orders of the mesh are tried for configurations whose first choice is near to the best.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from operator import attrgetter
from typing import Generic, TypeVar

from planner.plan.types import Rejection
from planner.search.columns import Partition
from planner.search.configuration_search import ConfigurationSearch
from planner.search.first_choices import FirstChoices
from planner.search.incumbents import Incumbents, Solved
from planner.search.interleaving import sharpen
from planner.search.partition import Partitions
from planner.search.prospects import Prospect
from planner.search.refusals import memory_refusals, slower_refusals
from planner.search.relaxation import Relaxation
from planner.search.stage_ilp import TOLERANCE, StageSolution
from planner.strategy.configuration import Configuration

Bounded = ConfigurationSearch | Prospect
"""What has a bound on its step."""

NEAR_SHARE = 0.05
"""Share by which a step may be longer than the best for other orders of the mesh to be tried."""
_VARIANT_SHARE = 0.5
"""Share by which a step may be longer than the best for a slower variant of a layout to be looked
at: more than step times may be off, within which it is a safer choice where it holds less."""

_LOOSE = 1.2
"""Times that the bound of ranks with several stages counts when the next to be looked at is chosen:
steps are up to so much longer, where stages of whole units are uneven. What is found among those of
one stage a rank, whose bounds are tight, then spares most of them a look. An order alone."""


class Visits:
    """Configurations that were looked at, and those that did not need to be."""

    def __init__(
        self,
        incumbents: Incumbents,
        *,
        others: Callable[[ConfigurationSearch], Iterable[ConfigurationSearch]] = lambda _: (),
        has_orders: Callable[[Configuration], bool] = lambda _: False,
    ) -> None:
        """Look at nothing yet.

        Args:
            incumbents: Takes what is found.
            others: The same configuration in other orders of the mesh.
            has_orders: Whether there are some.
        """
        self._incumbents = incumbents
        self._others = others
        self._has_orders = has_orders
        self._prospects: list[Prospect] = []
        self.searches: list[ConfigurationSearch] = []
        """Configurations that were priced."""
        self._in_other_orders: set[int] = set()
        self._placed: set[int] = set()

    @property
    def bounded(self) -> Iterable[Bounded]:
        """All that has a bound: what was priced, and what did not need to be."""
        return (*self.searches, *self._prospects)

    def look_at(self, searches: Sequence[Bounded]) -> None:
        """Look at configurations."""
        queue: LowestFirst[Bounded] = LowestFirst(searches, key=_turn_s)
        self.searches += (each for each in searches if isinstance(each, ConfigurationSearch))
        for search in queue:
            if isinstance(search, Prospect):
                queue.add(self._looked_into(search))
                continue
            visit = self._interleave if search.shares_ranks else self._partition
            queue.add(visit(search, queue.next_s))

    def look_at_orders(self) -> bool:
        """Look at the configurations that came near to the best in other orders of the mesh.

        Returns:
            Whether there are some that were not looked at before.
        """
        limit_s = self._incumbents.nth_s(1) * (1 + NEAR_SHARE)
        near = {
            id(each.search): each.search
            for each in self._incumbents.solved
            if each.objective_s <= limit_s
        }
        new = [search for at, search in near.items() if at not in self._placed]
        found = [other for search in new for other in self._others(search)]
        self._in_other_orders |= {id(other) for other in found}
        self._placed |= near.keys() | self._in_other_orders
        self.look_at(found)
        return bool(found)

    def _looked_into(self, prospect: Prospect) -> Sequence[Bounded]:
        """What to look at in place of a prospect: nothing where it cannot be among the best."""
        if prospect.bound_s >= self._limit_s(prospect):
            self._prospects.append(prospect)
            return []
        if prospect.sharpen():
            return [prospect]
        found = prospect.searches()
        self.searches += found
        return found

    def members(self, relaxation: Relaxation) -> list[ConfigurationSearch]:
        """Put in place of a relaxation what it stands for."""
        members = relaxation.members()
        self.searches.remove(relaxation)
        self.searches += members
        return members

    def _limit_s(self, search: Bounded) -> float:
        """What a configuration must beat: one that has other orders, to have these looked at."""
        limit_s = self._incumbents.limit_s(search.stands_for, near=_VARIANT_SHARE)
        if any(map(self._has_orders, search.stands_for)):
            limit_s = max(limit_s, self._incumbents.nth_s(1) * (1 + NEAR_SHARE))
        return limit_s

    def _partition(
        self, search: ConfigurationSearch, next_s: float
    ) -> Sequence[ConfigurationSearch]:
        """What to look at in place of a configuration with one stage per rank, which is cut.

        Itself where its bound proves higher than that of the next one, which comes first then.
        """
        limit_s = self._limit_s(search)
        if search.bound_s >= limit_s:
            return []
        partitions = Partitions(search, limit_s)
        if _turn_s(search) > next_s:
            return [search]
        return self._in_place(search, partitions.best(self._incumbents.nth_s(1)))

    def _interleave(
        self, search: ConfigurationSearch, next_s: float
    ) -> Sequence[ConfigurationSearch]:
        """The same of one with several stages per rank, by a bound and a first choice."""
        limit_s = self._limit_s(search)
        if search.bound_s < limit_s:
            sharpen(search)
        if search.bound_s >= limit_s:
            return []
        if _turn_s(search) > next_s:
            return [search]
        found = FirstChoices(search).first(limit_s)
        return self._in_place(search, found, limit_s)

    def _in_place(
        self, search: ConfigurationSearch, found: Partition | None, limit_s: float = inf
    ) -> Sequence[ConfigurationSearch]:
        """Of a relaxation of which something was found, which tells too little, its members."""
        if found is None:
            return []
        self.take(search, found)
        if isinstance(search, Relaxation) and found.objective_s < limit_s:
            return self.members(search)
        return []

    def take(self, search: ConfigurationSearch, found: Partition | StageSolution) -> None:
        """Keep what was found of a configuration; a relaxation is no plan by itself."""
        if not isinstance(search, Relaxation):
            self._incumbents.add(
                Solved(search=search, columns=found.columns, objective_s=found.objective_s)
            )

    def rejections(self) -> Iterator[Rejection]:
        """Say of every configuration without a solution why it was refused, once all is decided."""
        solved = {id(each.search) for each in self._incumbents.solved}
        best_s = self._incumbents.nth_s(1)
        for search in self.searches:
            if id(search) in self._in_other_orders:
                continue
            if search.bound_s == inf:
                yield from memory_refusals(search)
            elif id(search) not in solved and search.bound_s >= best_s * (1 - TOLERANCE):
                yield from slower_refusals(search)
        for prospect in self._prospects:
            yield from slower_refusals(prospect)


def _turn_s(search: Bounded) -> float:
    """When a configuration is looked at: by its bound, later where that tells less."""
    shares_ranks = isinstance(search, ConfigurationSearch) and search.shares_ranks
    return search.bound_s * (_LOOSE if shares_ranks else 1.0)


_Any = TypeVar("_Any", bound=Bounded)


class LowestFirst(Generic[_Any]):
    """Configurations by their bound, the lowest first; more may come."""

    def __init__(
        self, searches: Iterable[_Any], *, key: Callable[[Bounded], float] = attrgetter("bound_s")
    ) -> None:
        """Take the first of them.

        Args:
            searches: They.
            key: What is lowest of the first.
        """
        self._key = key
        self._heap = [(key(search), at, search) for at, search in enumerate(searches)]
        self._added = len(self._heap)
        heapify(self._heap)

    def add(self, searches: Iterable[_Any]) -> None:
        """Take more."""
        for search in searches:
            heappush(self._heap, (self._key(search), self._added, search))
            self._added += 1

    @property
    def next_s(self) -> float:
        """The lowest key."""
        return self._heap[0][0] if self._heap else inf

    def __iter__(self) -> Iterator[_Any]:
        """Give one after the other, each once."""
        while self._heap:
            yield heappop(self._heap)[2]
