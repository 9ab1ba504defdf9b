import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import RequestError
from planner.hardware.profiles import load_cluster
from planner.hardware.topology import comm_group

CLUSTER = load_cluster("h100-sxm", gpus=64)


def test_tp_stays_inside_a_node() -> None:
    group = comm_group(CLUSTER, degree=8, stride=1)
    assert (group.num_ranks, group.ranks_per_node, group.num_nodes) == (8, 8, 1)
    assert group.inner.name == "NVLink 4"
    assert group.outer is None


def test_dp_around_tp_crosses_nodes_one_rank_each() -> None:
    group = comm_group(CLUSTER, degree=8, stride=8)
    assert (group.ranks_per_node, group.num_nodes) == (1, 8)
    assert group.outer is not None
    assert group.outer.name.startswith("EFA")


def test_dp_around_a_small_tp_has_several_ranks_in_each_node() -> None:
    group = comm_group(CLUSTER, degree=32, stride=2)
    assert (group.ranks_per_node, group.num_nodes) == (4, 8)


@pytest.mark.parametrize(("degree", "stride", "per_node"), [(3, 1, 1), (12, 1, 4), (6, 2, 2)])
def test_groups_that_straddle_nodes_are_priced_by_the_worst(
    degree: int, stride: int, per_node: int
) -> None:
    group = comm_group(CLUSTER, degree=degree, stride=stride)
    assert group.ranks_per_node == per_node
    assert group.outer is not None


def test_a_group_of_any_size_stays_inside_a_single_node() -> None:
    cluster = load_cluster("h100-sxm", gpus=6)
    assert comm_group(cluster, degree=3, stride=2).outer is None


def test_an_axis_of_one_rank_crosses_nothing() -> None:
    assert comm_group(CLUSTER, degree=1, stride=64).outer is None


def test_an_axis_larger_than_the_cluster_is_refused() -> None:
    with pytest.raises(RequestError, match="16 ranks, 8 apart"):
        comm_group(CLUSTER, degree=16, stride=8)


@given(degree=st.integers(1, 64), stride=st.integers(1, 64))
def test_ranks_per_node_divides_the_group(degree: int, stride: int) -> None:
    if degree * stride > 64:
        return
    group = comm_group(CLUSTER, degree=degree, stride=stride)
    assert group.ranks_per_node * group.num_nodes == degree
    assert group.ranks_per_node <= 8
    assert (group.outer is None) == (group.num_nodes == 1)
