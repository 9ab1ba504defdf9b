"""Memory of plans whose states lie in host memory, beside their scripts."""

import pytest
from wide_blocks import model

import planner
from planner.checking.check import check_plan

FULL = {"reshard_after_forward": True, "activation_checkpointing": "full"}


def in_bench(*values):
    return pytest.param(*values, marks=pytest.mark.bench)


@pytest.mark.parametrize(
    ("fix", "microbatches", "dtype"),
    [
        ({"dp_shard": 1, "reshard_after_forward": True}, 1, "bfloat16"),
        in_bench({"dp_shard": 1, "reshard_after_forward": False}, 4, "bfloat16"),
        ({"dp_shard": 2, **FULL}, 4, "bfloat16"),
        in_bench({"dp_shard": 2, **FULL}, 1, "float32"),
        in_bench({"dp_shard": 8, **FULL}, 4, "bfloat16"),
        in_bench({"dp_shard": 8, "reshard_after_forward": False}, 1, "bfloat16"),
        in_bench({"dp_replicate": 2, "dp_shard": 2, **FULL}, 4, "bfloat16"),
        in_bench({"dp_replicate": 2, "dp_shard": 2, **FULL}, 1, "bfloat16"),
        ({"tp": 2, "dp_shard": 2, "reshard_after_forward": True}, 4, "bfloat16"),
        ({"pp": 2, "dp_shard": 2, "schedule": "1F1B"}, 4, "bfloat16"),
        in_bench({"pp": 2, "dp_shard": 2, "schedule": "GPipe"}, 4, "float32"),
    ],
)
def test_every_stage_holds_what_is_planned(fix, microbatches, dtype, tmp_path):
    (tmp_path / "wide.py").write_text(model(8192))
    samples = fix.get("dp_replicate", 1) * fix["dp_shard"]
    result = planner.estimate(
        str(tmp_path / "wide.py"),
        gpus=samples * fix.get("tp", 1) * fix.get("pp", 1),
        cluster="h100-sxm",
        seq_len=256,
        dtype=dtype,
        fix={"microbatch_size": 1, "cpu_offload": True, **fix},
        global_batch_size=samples * microbatches,
    )
    result.save(tmp_path / "plan")
    check = check_plan(tmp_path / "plan")
    assert check.traffic_holds
    for stage in check.stages:
        assert abs(stage.error) <= 0.05, stage
        assert stage.tracked_bytes["params"] == stage.tracked_bytes["optimizer"] == 0
