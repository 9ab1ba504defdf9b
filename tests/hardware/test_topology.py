from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from planner.errors import RequestError
from planner.hardware.profiles import load_cluster
from planner.hardware.topology import MeshAxis, comm_group, joining_link, shares_link, units_of

CLUSTER = load_cluster("h100-sxm", gpus=64)


def levels(num_gpus, *sizes, per_node=8):
    """A cluster with a link for each size of unit, and one around them all."""
    inner = CLUSTER.links[0]
    links = [replace(inner, name=f"joins {size}", ranks=size) for size in sizes]
    links.append(replace(inner, name="joins all", ranks=None))
    return replace(
        CLUSTER, num_gpus=num_gpus, gpus_per_node=min(num_gpus, per_node), links=tuple(links)
    )


def axis(size, stride):
    return MeshAxis(size=size, stride=stride)


def crossed(group):
    return [(each.link.name, each.num_parts, each.ranks_per_part) for each in group.crossings]


def test_tp_stays_inside_a_node():
    group = comm_group(CLUSTER, axis(8, 1))
    assert crossed(group) == [("NVLink 4", 8, 1)]
    assert not group.spans_nodes


def test_dp_around_tp_crosses_nodes_one_rank_each():
    group = comm_group(CLUSTER, axis(8, 8))
    assert crossed(group) == [("EFA 400 Gbit/s", 8, 1)]
    assert group.spans_nodes


def test_dp_around_a_small_tp_has_several_ranks_in_each_node():
    group = comm_group(CLUSTER, axis(32, 2))
    assert crossed(group) == [("NVLink 4", 32, 1), ("EFA 400 Gbit/s", 8, 4)]


@pytest.mark.parametrize(
    ("degree", "stride", "parts", "fewest"), [(3, 1, 2, 1), (12, 1, 2, 4), (6, 2, 2, 2)]
)
def test_groups_that_straddle_nodes_are_priced_by_the_worst(degree, stride, parts, fewest):
    group = comm_group(CLUSTER, axis(degree, stride))
    assert crossed(group)[-1] == ("EFA 400 Gbit/s", parts, fewest)


def test_each_level_of_links_that_a_group_crosses_counts():
    racks = levels(144, 4, 72, per_node=4)
    assert crossed(comm_group(racks, axis(144, 1))) == [
        ("joins 4", 144, 1), ("joins 72", 36, 4), ("joins all", 2, 72)
    ]  # fmt: skip
    assert crossed(comm_group(racks, axis(2, 72))) == [("joins all", 2, 1)]
    assert crossed(comm_group(racks, axis(18, 4))) == [("joins 72", 18, 1)]


def test_a_last_node_that_is_not_full_holds_fewest():
    group = comm_group(load_cluster("h100-sxm", gpus=20), axis(20, 1))
    assert crossed(group) == [("NVLink 4", 20, 1), ("EFA 400 Gbit/s", 3, 4)]


def test_axes_around_one_another_make_one_group():
    assert comm_group(CLUSTER, axis(4, 2), axis(8, 8)) == comm_group(CLUSTER, axis(32, 2))


def test_a_group_of_axes_apart_has_ranks_in_both():
    group = comm_group(CLUSTER, axis(2, 1), axis(4, 16))
    assert crossed(group) == [("NVLink 4", 8, 1), ("EFA 400 Gbit/s", 4, 2)]


def test_a_group_of_any_size_stays_inside_a_single_node():
    cluster = load_cluster("h100-sxm", gpus=6)
    assert not comm_group(cluster, axis(3, 2)).spans_nodes


def test_an_axis_of_one_rank_crosses_nothing():
    group = comm_group(CLUSTER, axis(1, 64))
    assert (group.num_ranks, group.spans_nodes) == (1, False)


def test_an_axis_larger_than_the_cluster_is_refused():
    with pytest.raises(RequestError, match="16 ranks, 8 apart"):
        comm_group(CLUSTER, axis(16, 8))


def test_the_slowest_link_of_one_group_is_shared_by_those_that_cross_it():
    inside, across, both = (comm_group(CLUSTER, axis(*each)) for each in ((8, 1), (8, 8), (64, 1)))
    assert not shares_link(across, inside)
    assert shares_link(across, both)
    assert shares_link(inside, both)


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    chosen=st.integers(1, 15),
    units=st.lists(st.integers(1, 5), min_size=1, max_size=3),
)
def test_parts_are_those_that_one_counts(sizes, chosen, units):
    """Any axes of any mesh, on units of any size that the mesh need not fill."""
    num_gpus = 1
    axes = []
    for number, size in enumerate(sizes):
        if chosen & 2**number:
            axes.append(axis(size, num_gpus))
        num_gpus *= size
    assume(axes)
    joins = [units[0]]
    for each in units[1:]:
        joins.append(joins[-1] * (each + 1))
    cluster = levels(num_gpus, *joins)
    steps = [sum(each) for each in product(*(range(0, a.size * a.stride, a.stride) for a in axes))]
    starts = [rank for rank in range(num_gpus) if all(rank // a.stride % a.size == 0 for a in axes)]
    wanted = []
    for below, (link, unit) in zip(
        [1, *joins], zip(cluster.links, [*joins, num_gpus], strict=True), strict=True
    ):
        inside = [Counter((start + s) // below for s in steps) for start in starts]
        around = [Counter((start + s) // unit for s in steps) for start in starts]
        parts = max(map(len, inside))
        if max(map(len, around)) < parts:
            wanted.append((link.name, parts, min(min(each.values()) for each in inside)))
    group = comm_group(cluster, *axes)
    assert group.num_ranks == len(steps)
    if len(steps) > 1:
        assert crossed(group) == wanted


@given(inner=st.integers(1, 6), size=st.integers(1, 6), outer=st.integers(1, 6), data=st.data())
def test_two_places_of_an_axis_are_joined_by_the_link_that_joins_all_of_them(
    inner, size, outer, data
):
    first, second = (data.draw(st.integers(0, size - 1)) for _ in range(2))
    unit = data.draw(st.integers(1, 12))
    cluster = levels(inner * size * outer, unit)
    starts = [a + b * inner * size for a in range(inner) for b in range(outer)]
    joined = all(
        (start + first * inner) // unit == (start + second * inner) // unit for start in starts
    )
    link = cluster.links[joining_link(units_of(cluster), axis(size, inner), first, second)]
    assert link is cluster.links[0 if joined else 1]
