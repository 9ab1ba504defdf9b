"""Memory of plans that keep inputs of blocks in host memory, beside their scripts."""

import pytest
from wide_blocks import model

import planner
from planner.checking.check import check_plan

LONG = model(64).replace("max_seq_len=256", "max_seq_len=16384")
"""Of so few classes that blocks take the most memory."""


@pytest.mark.parametrize(
    "fix",
    [
        pytest.param({"dp_shard": 2, "reshard_after_forward": True}, marks=pytest.mark.bench),
        pytest.param({"cp": 2, "dp_shard": 2}, marks=pytest.mark.bench),
        {"tp": 2, "sequence_parallel": True},
        pytest.param(
            {"tp": 2, "sequence_parallel": False, "cpu_offload": True}, marks=pytest.mark.bench
        ),
    ],
)
def test_every_rank_holds_what_is_planned(fix, tmp_path):
    (tmp_path / "long.py").write_text(LONG)
    peaks = []
    samples = fix.get("dp_shard", 1)
    for offloads in (False, True):
        result = planner.estimate(
            str(tmp_path / "long.py"),
            gpus=samples * fix.get("cp", 1) * fix.get("tp", 1),
            cluster="h100-sxm",
            seq_len=16384,
            global_batch_size=samples,
            fix={**fix, "activation_checkpointing": "full", "activation_offload": offloads},
        )
        result.save(tmp_path / "plan", force=True)
        check = check_plan(tmp_path / "plan")
        assert check.traffic_holds
        (stage,) = check.stages
        assert abs(stage.error) <= 0.03, stage
        peaks.append(stage.tracked_peak_bytes)
    kept = fix.get("cp", 1) * (fix.get("tp", 1) if fix.get("sequence_parallel") else 1)
    inputs_bytes = 8 * 16384 * 1024 * 2 // kept
    assert peaks[1] < peaks[0]
    if "cpu_offload" not in fix:
        assert result.best.host_bytes_by_rank == (inputs_bytes,)
