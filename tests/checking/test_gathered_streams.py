"""What ranks of tp gather of a stream of which each has a part."""

import pytest
from wide_blocks import model

import planner
from planner.checking.check import check_plan

LONG = model(1024).replace("max_seq_len=256", "max_seq_len=16384")


SELECTIVE = pytest.param("selective", marks=pytest.mark.bench)


@pytest.mark.parametrize("recompute", ["none", SELECTIVE, "full"])
@pytest.mark.parametrize("fix", [{"tp": 4}, {"tp": 2, "cp": 2}])
def test_blocks_take_what_is_planned(fix, recompute, tmp_path):
    """Of activations a part of which is gathered, more than of anything else."""
    (tmp_path / "long.py").write_text(LONG)
    planner.estimate(
        str(tmp_path / "long.py"),
        gpus=4,
        cluster="h100-sxm",
        seq_len=16384,
        global_batch_size=1,
        fix={"sequence_parallel": True, "activation_checkpointing": recompute, **fix},
    ).save(tmp_path / "plan")
    check = check_plan(tmp_path / "plan")
    assert check.traffic_holds
    (stage,) = check.stages
    assert abs(stage.error) <= 0.03, stage


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_blocks_that_read_their_input_as_it_is_gather_it_again(recompute, tmp_path):
    """A stand-in for what they gather went with their input, which outlives them: 44% more.

    Of several samples there is a copy beside each gather and each sum: 4 to 8% more.
    """
    planner.estimate(
        "tests/run/long_rows.py",
        gpus=4,
        cluster="h100-sxm",
        global_batch_size=8,
        fix={
            **{"tp": 4, "sequence_parallel": True, "microbatch_size": 8},
            "activation_checkpointing": recompute,
        },
    ).save(tmp_path / "plan")
    check = check_plan(tmp_path / "plan")
    assert check.traffic_holds
    (stage,) = check.stages
    assert abs(stage.error) <= 0.01, stage
