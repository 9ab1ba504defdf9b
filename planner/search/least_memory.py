"""What a configuration needs at the least: what is told of one that does not fit."""

from dataclasses import dataclass

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
    found = []
    for rank in range(search.configuration.degrees.pp):
        stages = range(rank, search.configuration.num_stages, search.configuration.degrees.pp)
        runs = [(cuts[stage], cuts[stage + 1]) for stage in stages]
        kinds = [search.maker.leanest(*run).kinds for run in runs]
        peaks = [
            search.table.memory.peak(
                [
                    HeldStage(first=first, end=end, kinds=each, in_flight=number)
                    for (first, end), each, number in zip(runs, kinds, counts, strict=True)
                ]
            )
            for counts in search.in_flight(rank)
        ]
        found.append(
            LeastMemory(
                memory=max(peaks, key=lambda memory: memory.total_bytes),
                rank=rank,
                kinds=tuple(kind for each in kinds for kind in each),
            )
        )
    return max(found, key=lambda need: need.memory.total_bytes)
