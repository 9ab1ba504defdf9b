from dataclasses import replace
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.collective import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    broadcast_s,
    point_to_point_s,
    reduce_scatter_s,
)
from planner.hardware.profiles import list_clusters, load_cluster
from planner.hardware.spec import LinkSpec
from planner.hardware.topology import CommGroup, Crossing, MeshAxis, comm_group

GB = 10**9
COLLECTIVES = (all_gather_s, reduce_scatter_s, all_reduce_s, all_to_all_s, broadcast_s)
H100 = load_cluster("h100-sxm", gpus=64)
SHARES = st.floats(0.0, 1.0)


def link(bandwidth: float, latency: float, ramp: float, switch: float) -> LinkSpec:
    return LinkSpec(
        name="link",
        ranks=None,
        bandwidth_bytes_per_s=bandwidth,
        latency_s=latency,
        base_latency_s=latency,
        ramp_bytes=ramp,
        switch_all_reduce_fraction=switch,
        numbers={},
    )


LINKS = st.builds(
    link,
    bandwidth=st.floats(1e6, 1e12),
    latency=st.floats(0, 1e-3),
    ramp=st.floats(0, 1e9),
    switch=SHARES,
)


def nested(fans: list[int], links: list[LinkSpec]) -> CommGroup:
    """Units of units of ranks, a link around each kind."""
    num_ranks = prod(fans)
    below = [prod(fans[:level]) for level in range(len(fans))]
    return CommGroup(
        num_ranks=num_ranks,
        crossings=tuple(
            Crossing(link=one, num_parts=num_ranks // each, ranks_per_part=each, in_node=not level)
            for level, (one, each) in enumerate(zip(links, below, strict=False))
        ),
    )


GROUPS = st.builds(
    nested,
    st.lists(st.integers(1, 8), min_size=1, max_size=4),
    st.lists(LINKS, min_size=4, max_size=4),
)
PAYLOADS = st.just(0.0) | st.floats(1e-3, 1e12)
"""Bytes, down to a share of one: seconds of 1e-311 bytes are subnormal, and round by percents."""


def faster(group: CommGroup, factor: float) -> CommGroup:
    def scaled(one: LinkSpec) -> LinkSpec:
        return link(
            one.bandwidth_bytes_per_s * factor,
            one.latency_s,
            one.ramp_bytes,
            one.switch_all_reduce_fraction,
        )

    return replace(
        group,
        crossings=tuple(replace(each, link=scaled(each.link)) for each in group.crossings),
    )


@pytest.mark.parametrize("collective", COLLECTIVES)
@given(group=GROUPS, payload=PAYLOADS, more=PAYLOADS, factor=st.floats(1, 100))
def test_times_are_sound(collective, group, payload, more, factor) -> None:
    base = collective(payload, group)
    assert base >= 0
    assert collective(payload + more, group) >= base * (1 - 1e-9)
    assert collective(payload, faster(group, factor)) <= base * (1 + 1e-9)


@pytest.mark.parametrize("collective", COLLECTIVES)
@given(group=GROUPS, payload=PAYLOADS, times=st.integers(1, 100))
def test_a_larger_payload_takes_no_longer_for_each_byte(collective, group, payload, times) -> None:
    assert collective(times * payload, group) <= times * collective(payload, group) * (1 + 1e-9)


@given(group=GROUPS, payload=PAYLOADS)
def test_an_all_reduce_is_never_faster_than_an_all_gather(group, payload) -> None:
    assert all_reduce_s(payload, group) >= all_gather_s(payload, group)


@given(one=LINKS, payload=PAYLOADS, more=PAYLOADS, factor=st.floats(1, 100))
def test_transfers_are_sound(one, payload, more, factor) -> None:
    base = point_to_point_s(payload, one)
    assert base >= 0
    assert point_to_point_s(payload + more, one) >= base
    quick = link(one.bandwidth_bytes_per_s * factor, one.latency_s, one.ramp_bytes, 0.0)
    assert point_to_point_s(payload, quick) <= base * (1 + 1e-9)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("name", list_clusters())
def test_one_rank_costs_nothing(collective, name: str) -> None:
    group = comm_group(load_cluster(name, gpus=8), MeshAxis(size=1, stride=1))
    assert collective(GB, group) == 0.0


def test_a_ring_of_large_payload_runs_at_the_link_bandwidth() -> None:
    group = comm_group(H100, MeshAxis(size=8, stride=1))
    bus_bytes_per_s = 16 * GB * 7 / 8 / all_gather_s(16 * GB, group)
    assert bus_bytes_per_s == pytest.approx(group.slowest.bandwidth_bytes_per_s, rel=0.02)


def test_nvlink_sharp_beats_the_ring() -> None:
    group = comm_group(H100, MeshAxis(size=8, stride=1))
    assert all_reduce_s(16 * GB, group) < 1.6 * all_gather_s(16 * GB, group)


def test_nodes_send_through_the_ports_of_all_their_ranks() -> None:
    eight_ports = comm_group(H100, MeshAxis(size=64, stride=1))
    one_port = comm_group(H100, MeshAxis(size=8, stride=8))
    assert all_gather_s(16 * GB, one_port) > 5 * all_gather_s(16 * GB, eight_ports)


def test_crossing_nodes_costs_more_than_staying_inside() -> None:
    inside = comm_group(H100, MeshAxis(size=8, stride=1))
    across = comm_group(H100, MeshAxis(size=8, stride=8))
    for payload in (1024, 10**6, GB):
        assert all_reduce_s(payload, across) > all_reduce_s(payload, inside)


def test_a_small_all_reduce_across_many_nodes_takes_the_tree() -> None:
    group = comm_group(load_cluster("h100-sxm", gpus=512), MeshAxis(size=64, stride=8))
    assert group.spans_nodes
    ring_s = 2 * 63 * group.slowest.latency_s
    assert all_reduce_s(1024, group) < ring_s


def test_a_transfer_costs_its_latency_and_its_bytes() -> None:
    one = link(1e9, 1e-6, 0.0, 0.0)
    assert point_to_point_s(GB, one) == pytest.approx(1 + 2e-6)


def test_gloo_reduces_whole_tensors_for_a_scatter() -> None:
    group = comm_group(replace(H100, hides_traffic=False), MeshAxis(size=8, stride=1))
    assert group.reduces_whole
    assert reduce_scatter_s(GB, group) == all_reduce_s(GB, group) > all_gather_s(GB, group)
    assert not comm_group(H100, MeshAxis(size=8, stride=1)).reduces_whole
