"""Ops and tensors of one size, each made of that of another when somebody asks for it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Generic, TypeVar, overload

Item = TypeVar("Item")
Growth = TypeVar("Growth")


class Grown(Sequence[Item], Generic[Item, Growth]):
    """A tuple in which some items are grown; a search reads few of tens of thousands."""

    def __init__(
        self,
        low: Sequence[Item],
        growths: Mapping[int, Growth],
        grow: Callable[[Item, Growth], Item],
    ) -> None:
        """Make nothing yet.

        Args:
            low: The items before they grow.
            growths: Growth of the items at some positions.
            grow: Makes a grown item.
        """
        self._low = low
        self._growths = growths
        self._grow = grow
        self._items: dict[object, Item] = {}

    @overload
    def __getitem__(self, position: int) -> Item: ...

    @overload
    def __getitem__(self, position: slice) -> tuple[Item, ...]: ...

    def __getitem__(self, position: int | slice) -> Item | tuple[Item, ...]:
        """Return an item, or a tuple of several."""
        try:
            return self._items[position]
        except (KeyError, TypeError):  # not made yet, or a slice
            if isinstance(position, slice):
                return tuple(self[each] for each in range(*position.indices(len(self))))
            return self._made(position)

    def _made(self, position: int) -> Item:
        at = range(len(self))[position]
        if at not in self._items:
            item, growth = self._low[at], self._growths.get(at)
            self._items[at] = item if growth is None else self._grow(item, growth)
        return self._items[at]

    def __iter__(self) -> Iterator[Item]:
        """Go through the items; most readers stop early, or have gone through all before."""
        is_made = len(self._items) == len(self)
        return iter(self._all) if is_made else map(self.__getitem__, range(len(self)))

    @cached_property
    def _all(self) -> tuple[Item, ...]:
        return tuple(map(self.__getitem__, range(len(self))))

    def __len__(self) -> int:
        return len(self._low)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(other) != len(self):
            return NotImplemented
        return all(mine == its for mine, its in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))
