"""Action lists are those of torch's schedule classes; limits and activations in flight."""

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from planner.strategy.schedules import actions_by_rank, in_flight, schedule_rule

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


@pytest.mark.parametrize(("schedule", "pp", "virtual_stages", "num_microbatches"), CASES)
def test_in_flight_is_the_most_that_the_actions_hold(
    schedule, pp, virtual_stages, num_microbatches
):
    rows = actions_by_rank(
        schedule, pp=pp, virtual_stages=virtual_stages, num_microbatches=num_microbatches
    )
    for rank, row in enumerate(rows):
        held = [0] * virtual_stages
        vectors = in_flight(
            schedule, pp=pp, virtual_stages=virtual_stages,
            num_microbatches=num_microbatches, rank=rank,
        )  # fmt: skip
        reached = set()
        for stage, is_forward in row:
            held[stage // pp] += 1 if is_forward else -1
            reached.add(tuple(held))
            assert any(all(a <= b for a, b in zip(held, v, strict=True)) for v in vectors)
        assert set(vectors) <= reached


def test_1f1b_holds_as_many_as_stages_are_left():
    counts = [
        in_flight("1F1B", pp=4, virtual_stages=1, num_microbatches=8, rank=rank)
        for rank in range(4)
    ]
    assert counts == [((4,),), ((3,),), ((2,),), ((1,),)]


def test_limits_name_their_numbers():
    assert "2 < 4" in schedule_rule("1F1B", pp=4, virtual_stages=1, num_microbatches=2)
    assert "7 % 2 = 1" in schedule_rule(
        "Interleaved1F1B", pp=3, virtual_stages=2, num_microbatches=7
    )
    assert "2 < 4" in schedule_rule("Interleaved1F1B", pp=4, virtual_stages=2, num_microbatches=2)
    assert schedule_rule("GPipe", pp=4, virtual_stages=1, num_microbatches=2) is None
