"""What a configuration needs at the least: what is told of one that does not fit."""

from dataclasses import dataclass
from itertools import pairwise

from planner.cost.breakdown import MemoryBreakdown
from planner.cost.stage_memory import HeldStage
from planner.search.configuration_search import ConfigurationSearch
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
    mixes = [search.maker.leanest(*run) for run in pairwise(cuts)]
    static = [memory.static_bytes(*run) for run in pairwise(cuts)]
    reduction = [memory.reduction_bytes(*run) for run in pairwise(cuts)]
    kept = [
        mix.kept_bytes + memory.shared_bytes(*run)
        for mix, run in zip(mixes, pairwise(cuts), strict=True)
    ]

    def fullest(rank: int) -> tuple[float, int, tuple[int, ...]]:
        """What a rank holds, itself, and the microbatches in flight of its stages."""
        mine = slice(rank, None, pp)
        held = sum(static[mine]) + max(mix.temporary_bytes for mix in mixes[mine])
        in_flight_bytes, counts = max(
            (sum(n * size for n, size in zip(counts, kept[mine], strict=True)), counts)
            for counts in search.in_flight(rank)
        )
        return max(held + in_flight_bytes, sum(reduction[mine])), rank, counts

    _, rank, counts = max((fullest(rank) for rank in range(pp)), key=lambda each: each[0])
    stages = [
        HeldStage(first=first, end=end, kinds=mix.kinds, in_flight=number)
        for ((first, end), mix), number in zip(
            list(zip(pairwise(cuts), mixes, strict=True))[rank::pp], counts, strict=True
        )
    ]
    return LeastMemory(
        memory=memory.peak(stages),
        rank=rank,
        kinds=tuple(kind for stage in stages for kind in stage.kinds),
    )
