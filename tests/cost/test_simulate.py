"""The clock against closed forms of the schedules' step times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.simulate import simulate_s
from planner.strategy.schedules import actions_by_rank


def simulated(schedule, pp, virtual_stages, microbatches, forward, backward, transfer=0.0):
    actions = actions_by_rank(
        schedule, pp=pp, virtual_stages=virtual_stages, num_microbatches=microbatches
    )
    stages = pp * virtual_stages
    return simulate_s(
        actions,
        forward_s=[forward] * stages,
        backward_s=[backward] * stages,
        transfer_s=[transfer] * (stages - 1),
    )


@given(st.integers(1, 6), st.integers(1, 12), st.floats(0.1, 3), st.floats(0.1, 3))
def test_even_1f1b_and_gpipe_take_m_plus_p_minus_1_microbatches(pp, number, forward, backward):
    for schedule in ("1F1B", "GPipe"):
        if schedule == "1F1B" and number < pp:
            continue
        expected = (number + pp - 1) * (forward + backward)
        assert simulated(schedule, pp, 1, number, forward, backward) == pytest.approx(expected)


def test_interleaving_divides_the_bubble():
    plain = simulated("1F1B", 4, 1, 8, 2.0, 4.0)
    interleaved = simulated("Interleaved1F1B", 4, 2, 8, 1.0, 2.0)
    assert plain == pytest.approx((8 + 3) * 6.0)
    assert interleaved == pytest.approx(8 * 6.0 + 3 * 3.0)


def test_transfers_delay_the_fill():
    assert simulated("GPipe", 2, 1, 1, 1.0, 2.0, transfer=0.5) == pytest.approx(2 * 3.0 + 2 * 0.5)


def test_the_slowest_stage_sets_the_pace():
    actions = actions_by_rank("1F1B", pp=2, virtual_stages=1, num_microbatches=20)
    step = simulate_s(actions, forward_s=[1.0, 2.0], backward_s=[1.0, 2.0], transfer_s=[0.0])
    assert step == pytest.approx(20 * 4.0 + 2.0)
