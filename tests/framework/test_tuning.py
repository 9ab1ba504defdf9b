"""Each constant changes what it says, and nothing else."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import ProfileError
from planner.framework.profiles import load_framework
from planner.framework.tuning import SETTINGS, tune
from planner.hardware.profiles import load_cluster

FRAMEWORK = load_framework("nanotron")
CLUSTER = load_cluster("h100-sxm", gpus=16)
LAST = len(CLUSTER.links) - 1

US, MIB, GIB = 1e-6, 2**20, 2**30
EFFICIENCY = "cluster.device.efficiency"

PUT = {
    "host_dispatch_us": ("cluster.device.host_dispatch_s", US),
    "kernel_launch_us": ("cluster.device.kernel_launch_s", US),
    "collective_host_us": ("framework.collective_host_s", US),
    "network_host_us_per_rank": ("framework.network_host_s", US),
    "bucket_mib": ("framework.bucket_bytes", MIB),
    "gradient_overlap": ("framework.gradient_overlap", 1),
    "tp_overlap": ("framework.tp_overlap", 1),
    "partial_ring_share": ("framework.partial_ring_share", 1),
    "message_us": ("framework.message_s", US),
    "congested_message_us": ("framework.congested_message_s", US),
    "step_us": ("framework.step_s", US),
    "optimizer_moved_bytes_per_parameter": ("framework.optimizer_moved_bytes", 1),
    "accumulated_bytes_per_parameter": ("framework.accumulated_bytes", 1),
    "piled_share": ("framework.piled_share", 1),
    "reserve_gib": ("framework.reserve_bytes", GIB),
    "matmul_k_overhead_elements": (f"{EFFICIENCY}.matmul_k_overhead", 1),
}
"""Constants that take the place of a number, in its unit."""

SCALED_TOGETHER = {
    "sustained_fraction_of_peak": ("sustained_fraction", "matmul_fraction"),
    "attention_forward_fraction_of_peak": (
        "attention_forward_fraction",
        "attention_backward_fraction",
    ),
    "pointwise_fraction_of_bandwidth": (
        "pointwise_bandwidth_fraction",
        "reduction_bandwidth_fraction",
    ),
}
"""The first takes the value, the second keeps its proportion to it."""

MULTIPLIED = {
    "inner_bandwidth_share": (0, ("bandwidth_bytes_per_s",)),
    "inner_latency_factor": (0, ("latency_s", "base_latency_s")),
    "outer_bandwidth_share": (LAST, ("bandwidth_bytes_per_s",)),
    "outer_latency_factor": (LAST, ("latency_s", "base_latency_s")),
}
"""Numbers of one link are multiplied by the value."""


def leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Every number and word of nested dataclasses with its path."""
    if is_dataclass(value):
        for field in fields(value):
            yield from leaves(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, tuple) and value and is_dataclass(value[0]):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def flat(framework, cluster) -> dict[str, object]:
    return {**dict(leaves(framework, "framework")), **dict(leaves(cluster, "cluster"))}


BEFORE = flat(FRAMEWORK, CLUSTER)


def changes(values: Mapping[str, float]) -> dict[str, object]:
    after = flat(*tune(FRAMEWORK, CLUSTER, values))
    return {path: after[path] for path in after if after[path] != BEFORE[path]}


def expected(key: str, value: float) -> dict[str, float]:
    if key in PUT:
        path, unit = PUT[key]
        return {path: value * unit}
    if key in SCALED_TOGETHER:
        paths = [f"{EFFICIENCY}.{name}" for name in SCALED_TOGETHER[key]]
        return {path: BEFORE[path] * value / BEFORE[paths[0]] for path in paths}
    index, names = MULTIPLIED[key]
    paths = [f"cluster.links[{index}].{name}" for name in names]
    return {path: BEFORE[path] * value for path in paths}


def test_every_constant_is_tested():
    assert {*PUT, *SCALED_TOGETHER, *MULTIPLIED} == {*SETTINGS}
    assert LAST > 0


@pytest.mark.parametrize("key", SETTINGS)
@given(value=st.floats(0.011, 0.987))
def test_a_constant_changes_what_it_says_and_nothing_else(key, value):
    wanted = expected(key, value)
    found = changes({key: value})
    assert set(found) <= set(wanted)
    for path, number in wanted.items():
        assert found.get(path, BEFORE[path]) == pytest.approx(number)


@given(st.permutations(sorted(SETTINGS)))
def test_the_order_does_not_matter(keys):
    values = {key: 0.5 for key in keys}
    assert changes(values) == changes(dict(sorted(values.items())))


def test_no_constants_change_nothing():
    assert tune(FRAMEWORK, CLUSTER, {}) == (FRAMEWORK, CLUSTER)


def test_an_unknown_constant_is_an_error():
    with pytest.raises(ProfileError, match="'nanotron' tunes 'step_ms'") as caught:
        tune(FRAMEWORK, CLUSTER, {"step_ms": 1.0})
    assert "step_us" in caught.value.hint
