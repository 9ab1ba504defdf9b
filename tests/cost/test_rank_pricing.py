"""What the host takes for a tensor-parallel collective."""

from dataclasses import replace

import pytest

from planner.cost.step import rank_spec
from planner.framework.profiles import load_framework
from planner.framework.spec import FrameworkSpec
from planner.hardware.profiles import load_cluster
from planner.strategy.configuration import Configuration
from planner.strategy.mesh import ParallelDegrees

BY_RANK = replace(load_framework("nanotron"), collective_host_s=2e-4)


def host_s(framework: FrameworkSpec, *, tp: int, pp: int, dp: int = 1) -> float:
    """Seconds of the host for one collective on nodes of eight."""
    configuration = Configuration(
        degrees=ParallelDegrees(dp_replicate=dp, dp_shard=1, tp=tp, pp=pp),
        schedule="1F1B" if pp > 1 else "none",
        virtual_stages=1,
        microbatch_size=1,
        num_microbatches=8,
        reshard_after_forward=False,
        sequence_parallel=True,
        state_form="replicated",
    )
    cluster = load_cluster("h100-sxm", gpus=tp * pp * dp)
    pricing = rank_spec(cluster, framework, configuration, "bfloat16")
    return pricing.collective_host_s + pricing.network_host_s


def test_ranks_take_turns_where_stages_send_between_nodes() -> None:
    for tp in (2, 4, 8):
        assert host_s(BY_RANK, tp=tp, pp=2, dp=16 // tp // 2 * 2) == pytest.approx(2e-4 * (1 + tp))


def test_stages_of_one_node_and_no_stages_leave_the_host_alone() -> None:
    assert host_s(BY_RANK, tp=4, pp=2) == host_s(BY_RANK, tp=4, pp=1, dp=4) == 2e-4


def test_frameworks_that_issue_at_once_are_not_slowed() -> None:
    at_once = replace(BY_RANK, issues_by_rank=False)
    assert host_s(at_once, tp=8, pp=2) == 2e-4
