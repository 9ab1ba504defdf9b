"""Action lists are those of torch's schedule classes; limits."""

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from planner.strategy.schedules import actions_by_rank, schedule_rule

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
]


@pytest.mark.parametrize(("schedule", "pp", "virtual_stages", "num_microbatches"), CASES)
def test_actions_are_torchs(schedule, pp, virtual_stages, num_microbatches):
    torchs = get_schedule_ops(
        schedule, pp, num_microbatches, virtual_stages if virtual_stages > 1 else None
    )
    theirs = tuple(
        tuple(
            (action.stage_index, action.computation_type.value == "F")
            for action in row
            if action is not None and action.computation_type.value in ("F", "B")
        )
        for row in torchs
    )
    ours = actions_by_rank(
        schedule, pp=pp, virtual_stages=virtual_stages, num_microbatches=num_microbatches
    )
    assert ours == theirs


def test_limits_name_their_numbers():
    assert "2 < 4" in schedule_rule("1F1B", pp=4, virtual_stages=1, num_microbatches=2)
    assert "7 % 2 = 1" in schedule_rule(
        "Interleaved1F1B", pp=3, virtual_stages=2, num_microbatches=7
    )
    assert "2 < 4" in schedule_rule("Interleaved1F1B", pp=4, virtual_stages=2, num_microbatches=2)
    assert schedule_rule("GPipe", pp=4, virtual_stages=1, num_microbatches=2) is None
