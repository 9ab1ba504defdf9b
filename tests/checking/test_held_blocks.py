"""Memory of blocks whose peak lies in their own backward, against the script's.

Their own peaks decide: what a checkpoint holds of them, what their backward makes and frees.
"""

from pathlib import Path

import pytest

import planner
from planner.checking.check import check_plan

BLOCKS = Path(__file__).with_name("held_blocks.py")


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("fix", [{}, {"tp": 2}], ids=str)
@pytest.mark.parametrize("kind", ["plain", "turned", "own"])
def test_blocks_hold_what_is_planned(kind, fix, recompute, tmp_path):
    result = planner.plan(
        f"{BLOCKS}:{kind}",
        gpus=fix.get("tp", 1),
        cluster="h100-sxm",
        global_batch_size=16,
        dtype="float32",
        fix={"microbatch_size": 16, "activation_checkpointing": recompute, **fix},
    )
    result.save(tmp_path / "plan")
    check = check_plan(tmp_path / "plan")
    assert check.traffic_holds
    (stage,) = check.stages
    assert abs(stage.error) <= 0.01, stage
