"""States in host memory: what copies and updates take."""

from dataclasses import replace

import pytest

from planner.cost.offload import HostState
from planner.framework.profiles import load_framework
from planner.framework.script import SCRIPT
from planner.hardware.profiles import load_cluster
from planner.strategy.configuration import Configuration
from planner.strategy.mesh import ParallelDegrees

FRAMEWORK = load_framework(SCRIPT)
CLUSTER = load_cluster("h100-sxm", gpus=8)
HOST = CLUSTER.host
ELEMENTS = 10**9


def state(*, offload=True, reshard=True, microbatches=4, pp=1, dp_replicate=1):
    configuration = Configuration(
        degrees=ParallelDegrees(pp=pp, dp_replicate=dp_replicate, dp_shard=8 // pp // dp_replicate),
        schedule="1F1B" if pp > 1 else "none",
        virtual_stages=1,
        microbatch_size=1,
        num_microbatches=microbatches,
        reshard_after_forward=reshard,
        sequence_parallel=False,
        cpu_offload=offload,
    )
    return HostState(configuration, CLUSTER, FRAMEWORK)


def test_nothing_is_copied_where_states_lie_on_devices():
    here = state(offload=False)
    assert here.copy_s(ELEMENTS) == 0
    assert not here.lacks(1e18)
    moved = ELEMENTS * FRAMEWORK.optimizer_moved_bytes
    assert here.update_s(ELEMENTS) == moved / CLUSTER.device.pointwise_bytes_per_s


def test_copies_go_over_the_link_of_the_device():
    assert state().copy_s(HOST.link_bytes_per_s) == pytest.approx(1.0)
    assert state().lacks(HOST.memory_bytes + 1)
    assert not state().lacks(HOST.memory_bytes)


@pytest.mark.parametrize(
    ("changes", "additions"),
    [
        ({}, 3),
        ({"microbatches": 1}, 0),
        ({"reshard": False}, 0),
        ({"pp": 2, "reshard": False}, 0),
        ({"dp_replicate": 2}, 0),
    ],
)
def test_the_host_adds_up_what_is_reduced_in_each_microbatch(changes, additions):
    """Read twice and written once in float32; replicas add up theirs on their devices."""
    there = state(**changes)
    moved = ELEMENTS * (FRAMEWORK.optimizer_moved_bytes + 12 * additions)
    expected_s = moved / HOST.memory_bandwidth_bytes_per_s
    assert there.update_s(ELEMENTS) == pytest.approx(expected_s)
    assert there.waits == (additions > 0)


def test_ranks_share_the_host_of_their_node():
    alone = load_cluster("h100-sxm", gpus=1).host
    assert alone.memory_bytes == 8 * HOST.memory_bytes
    assert alone.memory_bandwidth_bytes_per_s == pytest.approx(
        8 * HOST.memory_bandwidth_bytes_per_s
    )
    assert alone.link_bytes_per_s == HOST.link_bytes_per_s
    assert replace(alone, numbers={}) == replace(
        load_cluster("h100-sxm", gpus=16, gpus_per_node=1).host, numbers={}
    )
