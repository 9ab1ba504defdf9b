"""Ops and tensors of one size, each made of that of another when somebody asks for it."""

from collections.abc import Callable, Mapping, Sequence
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
        self._items: list[Item | None] = [None] * len(low)

    @overload
    def __getitem__(self, position: int) -> Item: ...

    @overload
    def __getitem__(self, position: slice) -> tuple[Item, ...]: ...

    def __getitem__(self, position: int | slice) -> Item | tuple[Item, ...]:
        """Return an item, or a tuple of several."""
        if isinstance(position, slice):
            return tuple(self[each] for each in range(*position.indices(len(self._items))))
        item = self._items[position]
        if item is None:
            item = self._low[position]
            growth = self._growths.get(position % len(self._items))
            if growth is not None:
                item = self._grow(item, growth)
            self._items[position] = item
        return item

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(other) != len(self):
            return NotImplemented
        return all(mine == its for mine, its in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))
