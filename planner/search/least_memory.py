"""What a configuration needs at the least: what is told of one that does not fit."""

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


def least_memory(search: ConfigurationSearch) -> LeastMemory:
    """The fullest rank of an even cut with the recomputation that keeps the least."""
    cuts = search.even_cut()
    pp, memory = search.configuration.degrees.pp, search.table.memory
    columns = [search.leanest(stage, *run) for stage, run in enumerate(pairwise(cuts))]

    def fullest(rank: int) -> tuple[float, int, RankMoment]:
        """What a rank holds, itself, and when."""
        mine = columns[rank::pp]
        held, moment = max(
            (
                (_held_bytes(mine, moment), moment)
                for moment in search.configuration.fullest_moments(rank)
            ),
            key=lambda each: each[0],
        )
        return max(held, sum(column.reduction_bytes for column in mine)), rank, moment

    _, rank, moment = max((fullest(rank) for rank in range(pp)), key=lambda each: each[0])
    stages = [
        HeldStage(first=column.first, end=column.end, kinds=column.mix.kinds, moment=at)
        for column, at in zip(columns[rank::pp], moment, strict=True)
    ]
    return LeastMemory(
        memory=memory.peak(stages),
        rank=rank,
        kinds=tuple(kind for stage in stages for kind in stage.kinds),
    )


def _held_bytes(columns: Sequence[Column], moment: RankMoment) -> float:
    pairs = list(zip(columns, moment, strict=True))
    transient = max(column.mix.transient_bytes(at) for column, at in pairs)
    return transient + sum(column.held_bytes(at) for column, at in pairs)
