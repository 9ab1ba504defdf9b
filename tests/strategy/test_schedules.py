"""Action lists are those of torch's schedule classes; limits."""

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining._utils import generate_rank_to_stage_mapping

from planner.strategy.schedules import (
    actions_by_rank,
    divided_rule,
    rank_of_stage,
    schedule_rule,
    stages_of_rank,
)

CASES = [
    ("1F1B", 4, 1, 8),
    ("1F1B", 4, 1, 4),
    ("GPipe", 4, 1, 2),
    ("GPipe", 2, 1, 5),
    ("Interleaved1F1B", 2, 2, 4),
    ("Interleaved1F1B", 4, 2, 8),
    ("Interleaved1F1B", 4, 3, 12),
    ("Interleaved1F1B", 4, 2, 6),
    ("Interleaved1F1B", 3, 4, 9),
    ("InterleavedZeroBubble", 2, 2, 4),
    ("InterleavedZeroBubble", 4, 3, 12),
    ("InterleavedZeroBubble", 4, 2, 6),
    ("ZBVZeroBubble", 2, 2, 1),
    ("ZBVZeroBubble", 2, 2, 8),
    ("ZBVZeroBubble", 4, 2, 3),
    ("ZBVZeroBubble", 4, 2, 16),
    ("ZBVZeroBubble", 5, 2, 9),
    ("DualPipeV", 2, 2, 4),
    ("DualPipeV", 3, 2, 6),
    ("DualPipeV", 4, 2, 13),
    ("DualPipeV", 5, 2, 10),
]


def passes(row):
    """What runs; the first stage runs nothing as the first part of a backward, and then all."""
    for action in row:
        for each in (action.sub_actions or (action,)) if action is not None else ():
            stage, what = each.stage_index, each.computation_type.value
            if what in ("F", "B") or (what in ("I", "W") and stage > 0):
                yield stage, what
            elif what == "W":
                yield stage, "B"


@pytest.mark.parametrize(("schedule", "pp", "virtual_stages", "num_microbatches"), CASES)
def test_actions_are_torchs(schedule, pp, virtual_stages, num_microbatches):
    torchs = get_schedule_ops(
        schedule, pp, num_microbatches, virtual_stages if virtual_stages > 1 else None
    )
    theirs = tuple(tuple(passes(row)) for row in torchs)
    ours = actions_by_rank(
        schedule, pp=pp, virtual_stages=virtual_stages, num_microbatches=num_microbatches
    )
    assert ours == theirs


@pytest.mark.parametrize(("schedule", "style"), [("Interleaved1F1B", "loop"), ("DualPipeV", "v")])
def test_stages_lie_where_torch_has_them(schedule, style):
    torchs = generate_rank_to_stage_mapping(3, 6, style=style)
    for rank in range(3):
        mine = stages_of_rank(schedule, rank, pp=3, num_stages=6)
        assert list(mine) == torchs[rank]
        assert {rank_of_stage(schedule, stage, 3) for stage in mine} == {rank}


def test_limits_name_their_numbers():
    assert "2 < 4" in schedule_rule("1F1B", pp=4, virtual_stages=1, num_microbatches=2)
    assert "7 % 2 = 1" in schedule_rule(
        "Interleaved1F1B", pp=3, virtual_stages=2, num_microbatches=7
    )
    assert "2 < 4" in schedule_rule("Interleaved1F1B", pp=4, virtual_stages=2, num_microbatches=2)
    assert "7 < 8" in schedule_rule("DualPipeV", pp=4, virtual_stages=2, num_microbatches=7)
    assert "not 3" in schedule_rule("ZBVZeroBubble", pp=4, virtual_stages=3, num_microbatches=8)
    assert schedule_rule("GPipe", pp=4, virtual_stages=1, num_microbatches=2) is None


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"recompute": "selective"}, "can be none"),
        ({"recompute": "full"}, "can be none"),
        ({"reshard_after_forward": True}, "can be false"),
        ({"whole": "compile"}, "compile=true"),
        ({"whole": "float8"}, "float8=true"),
    ],
)
def test_divided_backwards_say_what_they_do_not_go_with(asked, words):
    how = {"recompute": "none", "reshard_after_forward": False, "whole": ""}
    assert words in divided_rule("ZBVZeroBubble", **{**how, **asked})
    assert divided_rule("ZBVZeroBubble", **how) is None
    assert divided_rule("Interleaved1F1B", **{**how, **asked}) is None
