"""Groups of a measurement divide all ranks, however many there are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.profiling.collective_timing import Groups, groups_of


@given(per_node=st.integers(1, 12), nodes=st.integers(1, 6), quick=st.booleans())
def test_each_rank_is_in_one_group_of_a_kind(per_node, nodes, quick):
    world = per_node * nodes
    for groups in groups_of(world, per_node, quick=quick):
        members = groups.members(world)
        assert sorted(rank for group in members for rank in group) == list(range(world))
        assert all(len(group) == groups.num_ranks > 1 for group in members)


@pytest.mark.parametrize("quick", [True, False])
def test_the_ranks_of_a_host_are_one_of_the_groups(quick):
    """Ranks that share cores are measured all together, also an odd number."""
    for per_node in range(2, 10):
        whole = Groups(num_ranks=per_node, stride=1)
        assert whole in groups_of(per_node, per_node, quick=quick)
    assert groups_of(1, 1, quick=quick) == []
