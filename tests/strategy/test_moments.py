"""A rank is never fuller than at one of its fullest moments, whatever its action list."""

from dataclasses import replace

import pytest

from planner.strategy.moments import StageMoment, StateMoves, fullest_moments, mean_starts
from planner.strategy.schedules import actions_by_rank
from planner.vocabulary import ZERO_BUBBLE_SCHEDULES


def held_numbers(moment):
    """What grows with memory, for each stage."""
    return [
        number
        for held in moment
        for number in (
            held.in_flight,
            held.in_flight - held.is_ending,
            not held.is_ending,
            held.follows_backward,
            held.has_gradients,
            held.waiting,
            held.is_dividing,
            not held.is_dividing,
            held.has_new_gradients,
            held.is_running,
        )
    ]


def while_running(now, local):
    """The stages of a rank while one of them runs."""
    return tuple(replace(held, is_running=at == local) for at, held in enumerate(now))


def states(held, what, moves):
    """What a stage holds when an action ends, with and without what then goes."""
    number, accumulates = held.in_flight, moves.accumulates
    if what == "F":
        after = replace(held, in_flight=number + 1, follows_backward=False)
        return after, after
    if what == "W":
        after = replace(
            held,
            waiting=held.waiting - 1,
            has_gradients=accumulates,
            has_new_gradients=accumulates,
        )
        return after, after
    if what == "I":
        after = replace(
            held, in_flight=number - 1, waiting=held.waiting + 1, has_new_gradients=False
        )
        return replace(after, is_dividing=True), after
    after = replace(
        held,
        in_flight=number - 1,
        follows_backward=moves.reshards,
        has_gradients=accumulates,
        has_new_gradients=False,
    )
    return replace(after, in_flight=number, is_ending=True), after


CASES = [
    ("1F1B", 4, 1, 4),
    ("1F1B", 4, 1, 8),
    ("1F1B", 4, 1, 100),
    ("GPipe", 4, 1, 2),
    ("GPipe", 2, 1, 5),
    ("Interleaved1F1B", 2, 2, 4),
    ("Interleaved1F1B", 4, 2, 6),
    ("Interleaved1F1B", 3, 4, 9),
    ("Interleaved1F1B", 4, 2, 100),
    ("Interleaved1F1B", 8, 2, 63),
    ("Interleaved1F1B", 2, 5, 1000),
    ("InterleavedZeroBubble", 4, 2, 8),
    ("InterleavedZeroBubble", 2, 3, 100),
    ("ZBVZeroBubble", 4, 2, 5),
    ("ZBVZeroBubble", 4, 2, 100),
    ("DualPipeV", 3, 2, 6),
    ("DualPipeV", 4, 2, 100),
]
"""A few microbatches, and so many that the list is shortened."""


@pytest.mark.parametrize("moves", [StateMoves(), StateMoves(reshards=True, accumulates=True)])
@pytest.mark.parametrize(("schedule", "pp", "virtual_stages", "num_microbatches"), CASES)
def test_no_action_holds_more_than_the_fullest_moments(
    schedule, pp, virtual_stages, num_microbatches, moves
):
    if moves.reshards and schedule in ZERO_BUBBLE_SCHEDULES:
        moves = replace(moves, reshards=False)
    rows = actions_by_rank(
        schedule, pp=pp, virtual_stages=virtual_stages, num_microbatches=num_microbatches
    )
    for rank, row in enumerate(rows):
        found = fullest_moments(
            schedule, pp=pp, virtual_stages=virtual_stages,
            num_microbatches=num_microbatches, rank=rank, moves=moves,
        )  # fmt: skip
        now = [StageMoment(in_flight=0)] * virtual_stages
        reached = set()
        for stage, what in row:
            local = stage // pp
            if what in "BI":
                reached.add(while_running(now, local))
            during, after = states(now[local], what, moves)
            now[local] = during
            if what in "FBI":
                reached.add(while_running(now, local))
            now[local] = after
        assert set(found) <= reached
        # What a rank's stages hold adds up, the transient of the one that runs among it.
        assert all(sum(held.is_running for held in moment) == 1 for moment in found)
        for moment in reached:
            assert any(
                all(a <= b for a, b in zip(held_numbers(moment), held_numbers(m), strict=True))
                for m in found
            )


def test_1f1b_holds_as_many_as_stages_are_left():
    for rank in range(4):
        (moment,) = fullest_moments(
            "1F1B", pp=4, virtual_stages=1, num_microbatches=8, rank=rank, moves=StateMoves()
        )
        assert moment == (StageMoment(in_flight=4 - rank),)


def test_with_few_microbatches_gradients_come_when_activations_go():
    starts, ends, again = fullest_moments(
        "1F1B", pp=2, virtual_stages=1, num_microbatches=2, rank=0,
        moves=StateMoves(accumulates=True),
    )  # fmt: skip
    assert starts == (StageMoment(in_flight=2),)
    assert ends == (StageMoment(in_flight=2, is_ending=True, has_gradients=True),)
    assert again == (StageMoment(in_flight=1, has_gradients=True),)


def test_the_mean_is_that_of_the_moments_when_backwards_start():
    moves = StateMoves(accumulates=True)
    how = {"pp": 2, "virtual_stages": 2, "num_microbatches": 40, "moves": moves}
    counts, shares = mean_starts("Interleaved1F1B", **how)
    for rank in range(2):
        found = fullest_moments("Interleaved1F1B", rank=rank, **how)
        starts = [moment for moment in found if not any(held.is_ending for held in moment)]
        for local in range(2):
            held = [moment[local] for moment in starts]
            stage = rank + 2 * local
            assert counts[stage] == pytest.approx(sum(m.in_flight for m in held) / len(held))
            assert shares[stage] == pytest.approx(sum(m.has_gradients for m in held) / len(held))
