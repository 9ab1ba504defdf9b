"""What is written down of a configuration that is refused."""

from collections.abc import Iterator

from planner.plan.types import Rejection
from planner.search.configuration_search import ConfigurationSearch
from planner.search.least_memory import least_memory
from planner.search.prospects import Prospect
from planner.strategy.configuration import Configuration
from planner.units import GIB


def refusal(
    configuration: Configuration, *, rule: str, detail: str, peak_memory_bytes: int | None = None
) -> Rejection:
    """Write down why a configuration is refused."""
    return Rejection(
        degrees=configuration.degrees,
        rule=rule,
        detail=detail,
        schedule=configuration.schedule,
        microbatch_size=configuration.microbatch_size,
        peak_memory_bytes=peak_memory_bytes,
    )


def memory_refusals(search: ConfigurationSearch) -> Iterator[Rejection]:
    """Say how much memory configurations need at the least, with the state shared the widest."""
    need = least_memory(search, beyond_bytes=search.room_bytes)
    ranks = search.configuration.degrees.dp_shard
    for configuration in search.stands_for:
        shared = "" if configuration.degrees.dp_shard == ranks else f" even with dp_shard {ranks}"
        yield refusal(
            configuration,
            rule="memory",
            detail=f"an even cut with {need.kinds_words} needs "
            f"{need.memory.total_bytes / GIB:.1f} GiB on pipeline rank {need.rank}{shared}; "
            f"the device has {search.table.device.capacity_words}",
            peak_memory_bytes=need.memory.total_bytes,
        )


def slower_refusals(search: ConfigurationSearch | Prospect) -> Iterator[Rejection]:
    """Say that configurations were set aside since others are faster."""
    for configuration in search.stands_for:
        yield refusal(
            configuration,
            rule="slower",
            detail=f"cannot be faster than {search.bound_s:.4g} s, and the plan is not slower",
        )
