"""Blocks that differ, each of some kind, within what they may keep together.

Block b takes s[b, k] and keeps m[b, k] under its kind k. When it runs its backward, all blocks keep
theirs a times, but for what is gone of the sections behind its own; r[b, k] is what that may be
where the block has the kind, less for what it holds for a while beside it. For each limit l

    minimise  sum over b of s[b, k(b)]   s.t.   a_l K - g_l G(b) <= r_l[b, k(b)]  for every b

    K  =  sum over b of m[b, k(b)]
    G(b)  =  sum over sections behind b's of  max(0, what the section keeps - left) - come

with g 1 where sections behind are gone by then, else 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Places = NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Blocks of which nothing is gone before others of theirs."""

    blocks: range
    """Which."""
    left: float
    """What of what they keep is not gone when the section before runs its backward."""
    come: float
    """What has come by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What blocks may keep at a moment."""

    each: float
    """How many times they keep theirs."""
    goes: bool
    """Whether sections behind are gone."""
    most: Floats
    """What all may be where one block has a kind, by block and kind."""


@dataclass(frozen=True, kw_only=True)
class Knapsack:
    """Blocks to choose kinds for."""

    seconds: Floats
    """What a block takes, by block and kind."""
    kept: Floats
    """What it keeps."""
    sizes: Floats
    """What of it counts for its section."""
    sections: Sequence[Section]
    """All blocks in order."""
    limits: Sequence[Limit]
    """What they may keep."""

    @cached_property
    def each(self) -> Floats:
        """Of all limits."""
        return np.array([limit.each for limit in self.limits])

    @cached_property
    def goes(self) -> Floats:
        """Of all limits."""
        return np.array([float(limit.goes) for limit in self.limits])

    @cached_property
    def most(self) -> Floats:
        """Of all limits."""
        return np.array([limit.most for limit in self.limits])

    def seconds_of(self, kinds: Places) -> float:
        """What a choice takes."""
        return sum_of(self.seconds, kinds)

    def excess(self, kinds: Places) -> Floats:
        """By how much a choice keeps more than each limit lets it, by limit and section."""
        rows, gone = np.arange(len(kinds)), 0.0
        held, most = self.each * sum_of(self.kept, kinds), self.most[:, rows, kinds]
        found = np.zeros((len(self.each), len(self.sections)))
        for place in reversed(range(len(self.sections))):
            section = self.sections[place]
            inside = slice(section.blocks.start, section.blocks.stop)
            found[:, place] = held - self.goes * gone - most[:, inside].min(axis=1)
            size = float(self.sizes[rows, kinds][inside].sum())
            gone += max(0.0, size - section.left) - section.come
        return found


def sum_of(of_kinds: Floats, kinds: Places) -> float:
    """Something of the kinds of all blocks."""
    return float(of_kinds[np.arange(len(kinds)), kinds].sum())
