"""What is written down of a configuration that is refused."""

from planner.plan.types import Rejection
from planner.search.configuration_search import ConfigurationSearch
from planner.search.least_memory import least_memory
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


def memory_refusal(search: ConfigurationSearch) -> Rejection:
    """Say how much memory a configuration needs at the least."""
    need = least_memory(search)
    return refusal(
        search.configuration,
        rule="memory",
        detail=f"an even cut with {need.kinds_words} needs {need.memory.total_bytes / GIB:.1f} GiB "
        f"on pipeline rank {need.rank}; the device has {search.table.device.capacity_words}",
        peak_memory_bytes=need.memory.total_bytes,
    )
