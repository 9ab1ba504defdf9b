"""What to tell a user for whose model nothing fits."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from planner.cost.breakdown import MemoryBreakdown
from planner.errors import InfeasiblePlanError
from planner.hardware.spec import ClusterSpec
from planner.search.configuration_search import ConfigurationSearch
from planner.search.fitting import fits_somehow
from planner.search.least_memory import LeastMemory, least_memory, on_host_bytes
from planner.search.mixed_space import layout_space
from planner.search.space import LayoutSpace
from planner.strategy.configuration import Configuration
from planner.strategy.rules import FixedValues
from planner.units import format_bytes

Resize = Callable[[int], ClusterSpec]
"""The same cluster with another number of devices."""

_MOST_GPUS = 16384
_COMPONENTS = {
    "params_bytes": "parameters",
    "grads_bytes": "gradients",
    "optimizer_bytes": "optimiser states",
    "activations_bytes": "activations",
    "buffers_bytes": "gathered parameters and buffers",
    "temporary_bytes": "temporaries",
    "reserve_bytes": "reserve",
}


def nothing_fits(
    space: LayoutSpace, searches: Sequence[ConfigurationSearch], resize: Resize
) -> InfeasiblePlanError:
    """Say by how much the closest layout misses, where, and the smallest change that fits."""
    host = space.cluster.host
    if host is not None and any(search.table.state.room_bytes for search in searches):
        needed = min(on_host_bytes(search) for search in searches)
        if needed > host.memory_bytes:
            return InfeasiblePlanError(
                f"the hosts of {space.cluster.devices_words} do not hold "
                f"what is offloaded: a rank needs {format_bytes(needed)} at the least, and has "
                f"{format_bytes(host.memory_bytes)} of its node",
                hint=_smallest_change(space, resize),
                shortfall_bytes_by_stage={},
            )
    needs = [(least_memory(search), search) for search in searches]
    need, search = min(needs, key=lambda pair: _short_bytes(*pair))
    device, short = search.at(need.rank).table.device, _short_bytes(need, search)
    degrees = search.configuration.degrees
    name, size = _largest_component(need.memory)
    return InfeasiblePlanError(
        f"no layout of {space.cluster.devices_words} holds the model: "
        f"the closest (dp_replicate {degrees.dp_replicate}, dp_shard {degrees.dp_shard}, "
        f"tp {degrees.tp}, pp {degrees.pp}, microbatch {search.configuration.microbatch_size}, "
        f"{need.kinds_words}) needs {format_bytes(need.memory.total_bytes)} of "
        f"{device.capacity_words} on stage {need.rank}: short by "
        f"{format_bytes(short)}, "
        f"the largest part {name} with {format_bytes(size)}",
        hint=_smallest_change(space, resize) + _not_recomputed(space),
        shortfall_bytes_by_stage={need.rank: short},
    )


def _short_bytes(need: LeastMemory, search: ConfigurationSearch) -> int:
    """What the fullest rank needs beyond what a plan may fill of its device."""
    return need.memory.total_bytes - search.at(need.rank).table.device.capacity_bytes


def _not_recomputed(space: LayoutSpace) -> str:
    """Why recomputation was left out that was not ruled out by what is fixed."""
    refusals = space.facts.recompute_refusals
    if space.request.fixed.activation_checkpointing is not None or not refusals:
        return ""
    reasons: dict[str, list[str]] = {}
    for kind, reason in refusals.items():
        reasons.setdefault(reason, []).append(kind)
    return "".join(
        f" activation_checkpointing={' and '.join(kinds)} is left out: {reason}."
        for reason, kinds in reasons.items()
    )


def _largest_component(memory: MemoryBreakdown) -> tuple[str, int]:
    sizes = {field: getattr(memory, field) for field in _COMPONENTS}
    largest = max(sizes, key=lambda field: sizes[field])
    return _COMPONENTS[largest], sizes[largest]


def _smallest_change(space: LayoutSpace, resize: Resize) -> str:
    """The first change that fits: less fixed, else the least power of two of more devices."""
    fixed, device = space.request.fixed, space.cluster.device
    if device.margin_bytes:
        filled = space.cluster.with_devices(lambda each: each.with_margin(0.0))
        if _fits(space, filled, fixed):
            return f"It fits with less than {device.margin_words}: --memory-margin 0."
    for setting in ("activation_checkpointing", "microbatch_size"):
        value = getattr(fixed, setting)
        open_value: Any = {setting: None}
        if value is not None and _fits(space, space.cluster, replace(fixed, **open_value)):
            return f"It fits without --fix {setting}={value}."
    free = replace(fixed, dp_replicate=None, dp_shard=None, cp=None, tp=None, pp=None, ep=None)
    if free != fixed and _fits(space, space.cluster, free):
        return "It fits with other degrees: fix fewer axes."
    if space.cluster.parts:
        return "It may fit with more devices of each kind, or a smaller --seq-len."
    gpus = 2 * space.cluster.num_gpus
    while gpus <= _MOST_GPUS:
        if _fits(space, resize(gpus), free):
            return f"The smallest change that fits: --gpus {gpus}."
        gpus *= 2
    return f"Not even {_MOST_GPUS} of these devices hold it: use a smaller model or --seq-len."


def _fits(space: LayoutSpace, cluster: ClusterSpec, fixed: FixedValues) -> bool:
    """Whether some layout with the smallest microbatch fits a cluster."""
    batch = max(space.request.global_batch_size, cluster.num_gpus)
    batch += -batch % cluster.num_gpus
    request = replace(space.request, fixed=fixed, global_batch_size=batch)
    other = layout_space(space.graphs, cluster, request)
    if not other.state_fits():
        return False
    legal, _ = other.legal()
    return any(
        fits_somehow(search)
        for configuration in smallest(legal)
        for search in other.searches(configuration)
    )


def smallest(legal: Sequence[Configuration]) -> list[Configuration]:
    """The configurations that need the least: smallest microbatch, one stage per rank."""
    size = min((configuration.microbatch_size for configuration in legal), default=0)
    return [c for c in legal if c.microbatch_size == size and c.virtual_stages == 1]
