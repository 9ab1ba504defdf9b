"""What is written down of a configuration that is refused, and of all that is left out."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

from planner.plan.types import Reason, Rejection
from planner.search.configuration_search import REACH_UNITS, ConfigurationSearch
from planner.search.least_memory import LeastMemory, least_memory, on_host_bytes
from planner.search.prospects import Prospect
from planner.strategy.configuration import Configuration
from planner.units import GIB, format_bytes


def refusal(configuration: Configuration, *, rule: str, why: Callable[[], Reason]) -> Rejection:
    """Write down that a configuration is refused."""
    return Rejection(
        degrees=configuration.degrees,
        rule=rule,
        why=why,
        schedule=configuration.schedule,
        microbatch_size=configuration.microbatch_size,
    )


def memory_refusals(search: ConfigurationSearch) -> Iterator[Rejection]:
    """Say how much memory configurations need at the least, with the state shared the widest.

    It is looked for where somebody asks.
    """
    if search.table.state.lacks(on_host := on_host_bytes(search)):
        words = f"an even cut needs {format_bytes(on_host)} of the host of each rank, more than its"
        for configuration in search.stands_for:
            detail = f"{words} share of {format_bytes(search.table.state.room_bytes)}"
            yield refusal(configuration, rule="host memory", why=partial(Reason, detail=detail))
        return
    need = cache(partial(least_memory, search, first_short=True))
    ranks = search.configuration.degrees.dp_shard
    for configuration in search.stands_for:
        shared = "" if configuration.degrees.dp_shard == ranks else f" even with dp_shard {ranks}"
        why = partial(_too_large, need, shared, search)
        yield refusal(configuration, rule="memory", why=why)


def _too_large(need: Callable[[], LeastMemory], shared: str, search: ConfigurationSearch) -> Reason:
    least = need()
    capacity_words = search.at(least.rank).table.device.capacity_words
    total_bytes = least.memory.total_bytes
    return Reason(
        detail=f"an even cut with {least.kinds_words} needs {total_bytes / GIB:.1f} GiB on "
        f"pipeline rank {least.rank}{shared}; the device has {capacity_words}",
        peak_memory_bytes=total_bytes,
    )


def slower_refusals(search: ConfigurationSearch | Prospect) -> Iterator[Rejection]:
    """Say that configurations were set aside since others are faster."""
    detail = f"cannot be faster than {search.bound_s:.4g} s, and the plan is not slower"
    why = partial(Reason, detail=detail)
    return (refusal(each, rule="slower", why=why) for each in search.stands_for)


def left_out(searches: Sequence[ConfigurationSearch], best_s: float) -> tuple[str, ...]:
    """Say what the searched set leaves out, as far as it matters.

    Args:
        searches: Configurations that were priced.
        best_s: Step of the best.
    """
    limits: list[str] = []
    if any(search.shares_ranks for search in searches):
        limits.append(
            f"interleaved stages within {REACH_UNITS} unit of their even share, blocks of a stage "
            "recomputed alike, a power of two of them on a rank"
        )
    near = (search.share_off for search in searches if search.bound_s <= best_s)
    share_off = max(near, default=0.0)
    if share_off:
        limits.append(
            f"recomputation of blocks of many kinds within {share_off:.4%} of a stage's time"
        )
    return tuple(limits)
