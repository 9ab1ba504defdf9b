"""What is written down of a configuration that is refused."""

from collections.abc import Callable, Iterator
from functools import cache, partial

from planner.plan.types import Reason, Rejection
from planner.search.configuration_search import ConfigurationSearch
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
    need = cache(partial(least_memory, search, beyond_bytes=search.room_bytes))
    ranks = search.configuration.degrees.dp_shard
    for configuration in search.stands_for:
        shared = "" if configuration.degrees.dp_shard == ranks else f" even with dp_shard {ranks}"
        why = partial(_too_large, need, shared, search.table.device.capacity_words)
        yield refusal(configuration, rule="memory", why=why)


def _too_large(need: Callable[[], LeastMemory], shared: str, capacity_words: str) -> Reason:
    least = need()
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
