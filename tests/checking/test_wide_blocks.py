"""Memory of blocks that are large beside their tokens: gradients and parameters decide."""

import pytest
from wide_blocks import model

import planner
from planner.checking.check import check_plan

PIPED = {"pp": 4, "schedule": "1F1B", "activation_checkpointing": "full"}


def planned(tmp_path, *, fix, microbatches, gpus, dtype="bfloat16"):
    (tmp_path / "wide.py").write_text(model(4096))
    result = planner.estimate(
        str(tmp_path / "wide.py"),
        gpus=gpus,
        cluster="h100-sxm",
        seq_len=256,
        dtype=dtype,
        fix={"microbatch_size": 1, **fix},
        global_batch_size=fix.get("dp_shard", 1) * microbatches,
    )
    result.save(tmp_path / "plan")
    return result, check_plan(tmp_path / "plan")


@pytest.mark.parametrize(
    ("fix", "microbatches"),
    [
        ({**PIPED, "dp_shard": 2}, 8),
        ({**PIPED, "tp": 2, "sequence_parallel": True}, 8),
        ({"pp": 2, "dp_shard": 4, "virtual_stages": 2, "activation_checkpointing": "none"}, 8),
        ({"dp_shard": 8, "reshard_after_forward": False, "activation_checkpointing": "full"}, 1),
        ({"dp_shard": 8, "reshard_after_forward": True, "activation_checkpointing": "full"}, 1),
        ({"dp_shard": 8, "reshard_after_forward": True, "activation_checkpointing": "none"}, 1),
        ({"dp_shard": 8, "reshard_after_forward": False, "activation_checkpointing": "full"}, 4),
        ({"tp": 4, "dp_shard": 2, "sequence_parallel": True, "reshard_after_forward": False}, 1),
    ],
)
def test_every_stage_holds_what_is_planned(fix, microbatches, tmp_path):
    _, check = planned(tmp_path, fix=fix, microbatches=microbatches, gpus=8)
    assert check.traffic_holds
    for stage in check.stages:
        assert abs(stage.error) <= 0.03, stage


@pytest.mark.parametrize(
    ("fix", "microbatches", "gpus"),
    [
        ({"activation_checkpointing": "none"}, 1, 1),
        ({"activation_checkpointing": "full"}, 4, 1),
        ({**PIPED, "activation_checkpointing": "selective"}, 8, 4),
        pytest.param(
            {"pp": 2, "virtual_stages": 2, "activation_checkpointing": "full"}, 8, 2,
            marks=pytest.mark.bench,
        ),
    ],
)  # fmt: skip
def test_parameters_of_one_rank_are_held_once(fix, microbatches, gpus, tmp_path):
    """FSDP2 would hold gathered ones beside them."""
    result, check = planned(
        tmp_path, fix=fix, microbatches=microbatches, gpus=gpus, dtype="float32"
    )
    assert result.best.state_form == "plain"
    for stage in check.stages:
        assert abs(stage.error) <= 0.03, stage
