"""What a configuration needs at the least: what is told of one that does not fit."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.cost.breakdown import MemoryBreakdown
from planner.cost.held_stage import HeldStage
from planner.search.column_tables import held_at, sizes_of
from planner.search.columns import Column
from planner.search.configuration_search import ConfigurationSearch
from planner.strategy.moments import RankMoment, rank_moment
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


def least_memory(search: ConfigurationSearch, *, first_short: bool = False) -> LeastMemory:
    """The fullest rank of an even cut with the recomputation that keeps the least.

    Args:
        search: The configuration.
        first_short: Whether the first rank whose device is too small is taken for the fullest.
    """
    runs = list(pairwise(search.even_cut()))
    pp = search.configuration.degrees.pp

    def fullest(rank: int) -> _Fullest:
        stages = search.configuration.stages_of(rank)
        columns = [search.leanest(stage, *runs[stage]) for stage in stages]
        rows = search.configuration.moment_rows(rank)
        held = held_at(sizes_of(columns), rows.astype(float)).sum(axis=1)
        moment = rank_moment(rows[held.argmax()])
        most = max(float(held.max()), sum(column.state.reduction_bytes for column in columns))
        short_bytes = most - search.at(stages[0]).room_bytes
        return _Fullest(short_bytes=short_bytes, rank=rank, columns=columns, moment=moment)

    found: list[_Fullest] = []
    for rank in range(pp):
        found.append(fullest(rank))
        if first_short and found[-1].short_bytes > 0:
            break
    full = max(found, key=lambda each: each.short_bytes)
    stages = search.configuration.stages_of(full.rank)
    held = [
        HeldStage(first=runs[stage][0], end=runs[stage][1], kinds=column.mix.kinds, moment=at)
        for stage, column, at in zip(stages, full.columns, full.moment, strict=True)
    ]
    return LeastMemory(
        memory=search.at(stages[0]).table.memory.peak(held),
        rank=full.rank,
        kinds=tuple(kind for stage in held for kind in stage.kinds),
    )


def on_host_bytes(search: ConfigurationSearch) -> int:
    """Host memory of the fullest rank of an even cut."""
    runs = enumerate(pairwise(search.even_cut()))
    return round(max(search.at(stage).table.memory.host_bytes(*run) for stage, run in runs))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fullest:
    """A rank when it is fullest."""

    short_bytes: float
    """What it holds beyond the room of its device."""
    rank: int
    columns: Sequence[Column]
    """The leanest of its stages; they may stand for alike runs elsewhere."""
    moment: RankMoment
