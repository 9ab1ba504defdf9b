"""What a configuration needs at the least: what is told of one that does not fit."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.cost.breakdown import MemoryBreakdown
from planner.cost.held_stage import HeldStage
from planner.search.columns import Column
from planner.search.configuration_search import ConfigurationSearch
from planner.strategy.moments import RankMoment
from planner.vocabulary import Recomputation


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastMemory:
    """What the fullest rank of a configuration needs at the least."""

    memory: MemoryBreakdown
    """By component."""
    rank: int
    """Pipeline rank."""
    kinds: tuple[str, ...]
    """Recomputation of its units."""

    @property
    def kinds_words(self) -> str:
        """The recomputation in words."""
        kinds = {kind for kind in self.kinds if kind != Recomputation.NONE}
        return f"{'/'.join(sorted(kinds))} recomputation" if kinds else "no recomputation"


def least_memory(search: ConfigurationSearch, *, beyond_bytes: float = math.inf) -> LeastMemory:
    """The fullest rank of an even cut with the recomputation that keeps the least.

    Args:
        search: The configuration.
        beyond_bytes: The first rank that holds more than this, beside what is held in reserve, is
            taken for the fullest.
    """
    cuts = search.even_cut()
    pp, memory = search.configuration.degrees.pp, search.table.memory
    stages = list(enumerate(pairwise(cuts)))

    def columns(rank: int) -> list[Column]:
        """The leanest stages of a rank."""
        mine = search.configuration.stages_of(rank)
        return [search.leanest(stage, *run) for stage, run in stages if stage in mine]

    def fullest(rank: int) -> tuple[float, int, RankMoment]:
        """What a rank holds, itself, and when."""
        mine = columns(rank)
        held, moment = max(
            (
                (_held_bytes(mine, moment), moment)
                for moment in search.configuration.fullest_moments(rank)
            ),
            key=lambda each: each[0],
        )
        return max(held, sum(column.reduction_bytes for column in mine)), rank, moment

    found: list[tuple[float, int, RankMoment]] = []
    for rank in range(pp):
        found.append(fullest(rank))
        if found[-1][0] > beyond_bytes:
            break
    _, rank, moment = max(found, key=lambda each: each[0])
    held = [
        HeldStage(first=column.first, end=column.end, kinds=column.mix.kinds, moment=at)
        for column, at in zip(columns(rank), moment, strict=True)
    ]
    return LeastMemory(
        memory=memory.peak(held),
        rank=rank,
        kinds=tuple(kind for stage in held for kind in stage.kinds),
    )


def _held_bytes(columns: Sequence[Column], moment: RankMoment) -> float:
    pairs = list(zip(columns, moment, strict=True))
    transient = max(column.mix.transient_bytes(at) for column, at in pairs)
    return transient + sum(column.held_bytes(at) for column, at in pairs)
