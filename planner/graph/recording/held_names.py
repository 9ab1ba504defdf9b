"""Until when code holds what it has made: a variable, an argument, an item of a list.

Memory is free when nothing holds it. Autograd is one holder, which the saved values of ops tell of;
Python is the other. While forward is recorded, the owners of the newest tensors are counted before
each op; who still owns them when it has ended owns them for good, and the others were Python.
"""

import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

WATCHED = 128
"""Tensors that are watched at a time, the newest; what code holds longer counts so long."""


@dataclass(slots=True)
class _Watched:
    storage: int
    tensor: Tensor
    last: dict[int, int] = field(default_factory=dict)
    """The last op before which there were so many owners."""


class HeldNames:
    """Counts the owners of tensors."""

    def __init__(self) -> None:
        self._newest: deque[_Watched] = deque(maxlen=WATCHED)
        self._all: list[_Watched] = []

    def watch(self, storage: int, tensor: Tensor) -> None:
        """Count the owners of a tensor that is kept, from now on."""
        watched = _Watched(storage, tensor)
        self._newest.append(watched)
        self._all.append(watched)

    def before(self, op: int, *, forward: bool) -> None:
        """Note who owns what before an op runs."""
        count = sys.getrefcount
        for watched in self._newest if forward else ():
            watched.last[count(watched.tensor)] = op

    def last_ops(self) -> Mapping[int, int]:
        """The last op of forward before which code held a storage, by storage.

        Called when forward has ended.
        """
        found: dict[int, int] = {}
        for watched in self._all:
            for_good = sys.getrefcount(watched.tensor)
            held = [op for owners, op in watched.last.items() if owners > for_good]
            if held:
                found[watched.storage] = max(found.get(watched.storage, 0), *held)
        return found
