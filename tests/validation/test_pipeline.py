"""The step time of a pipeline, of which the steady part is not simulated."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.replicated import StagePasses
from planner.cost.simulate import simulate_s
from planner.strategy.schedules import actions_by_rank
from planner.validation.pricing.pipeline import pipeline_times


def passes(forward_s, backward_s=None, weight_s=None):
    """One microbatch through a stage; backward takes twice as long, half of it for weights."""
    backward_s = 2 * forward_s if backward_s is None else backward_s
    weight_s = backward_s / 2 if weight_s is None else weight_s
    return StagePasses(
        forward_s=forward_s,
        input_backward_s=backward_s - weight_s,
        weight_backward_s=weight_s,
        recompute_s=0.0,
        forward_comm_s=0.0,
        backward_comm_s=0.0,
        transfer_s=0.0,
    )


def fully_simulated_s(schedule, stages, pp, num_microbatches):
    actions = actions_by_rank(
        schedule,
        pp=pp,
        virtual_stages=len(stages) // pp,
        num_microbatches=num_microbatches,
    )
    return simulate_s(
        actions,
        forward_s=[each.forward_pass_s for each in stages],
        backward_s=[each.backward_pass_s for each in stages],
        transfer_s=[0.0] * (len(stages) - 1),
    )


times = st.floats(0.5, 2.0)


uneven_ranks = st.lists(st.tuples(times, times), min_size=2, max_size=6)


@given(ranks=uneven_ranks, num_microbatches=st.integers(1, 60))
def test_a_truncated_gpipe_is_that_of_all_microbatches(ranks, num_microbatches):
    stages = [passes(forward_s, backward_s) for forward_s, backward_s in ranks]
    found = pipeline_times("GPipe", stages, pp=len(ranks), num_microbatches=num_microbatches)
    whole_s = fully_simulated_s("GPipe", stages, len(ranks), num_microbatches)
    assert found.step_s == pytest.approx(whole_s, rel=1e-9)


@given(ranks=uneven_ranks, num_microbatches=st.integers(1, 60))
def test_a_truncated_1f1b_is_near_that_of_all_microbatches(ranks, num_microbatches):
    """It is exact where the slowest rank sets the pace within the rounds that are simulated."""
    stages = [passes(forward_s, backward_s) for forward_s, backward_s in ranks]
    found = pipeline_times("1F1B", stages, pp=len(ranks), num_microbatches=num_microbatches)
    whole_s = fully_simulated_s("1F1B", stages, len(ranks), num_microbatches)
    exact = num_microbatches <= 4 * len(ranks)
    assert found.step_s == pytest.approx(whole_s, rel=1e-9 if exact else 0.02)


@given(
    pp=st.integers(2, 6),
    rounds=st.integers(1, 12),
    virtual_stages=st.integers(2, 3),
    slow=st.integers(0, 17),
    forward_s=st.floats(0.8, 1.25),
)
def test_interleaved_stages_with_a_slow_one_are_hardly_misjudged(
    pp, rounds, virtual_stages, slow, forward_s
):
    """Chunks of a rank then wait for each other now and then, beyond the slowest rank's pace."""
    stages = [passes(1.0) for _ in range(pp * virtual_stages)]
    whole_s = fully_simulated_s("Interleaved1F1B", stages, pp, rounds * pp)
    found = pipeline_times("Interleaved1F1B", stages, pp=pp, num_microbatches=rounds * pp)
    assert found.step_s == pytest.approx(whole_s, rel=1e-9)
    stages[slow % len(stages)] = passes(forward_s)
    whole_s = fully_simulated_s("Interleaved1F1B", stages, pp, rounds * pp)
    found = pipeline_times("Interleaved1F1B", stages, pp=pp, num_microbatches=rounds * pp)
    assert found.step_s == pytest.approx(whole_s, rel=0.02)


@pytest.mark.parametrize("num_microbatches", [1, 7, 50])
def test_one_rank_has_no_bubble(num_microbatches):
    found = pipeline_times("none", [passes(1.0)], pp=1, num_microbatches=num_microbatches)
    assert found.step_s == 3 * num_microbatches
    assert found.in_flight == ((1,),)


@pytest.mark.parametrize("num_microbatches", [8, 64, 1000])
def test_even_stages_have_the_closed_form(num_microbatches):
    found = pipeline_times("1F1B", [passes(1.0)] * 8, pp=8, num_microbatches=num_microbatches)
    assert found.step_s == pytest.approx(3 * (num_microbatches + 7))
    assert found.in_flight == tuple((8 - rank,) for rank in range(8))


def test_gpipe_holds_all_microbatches():
    found = pipeline_times("GPipe", [passes(1.0)] * 4, pp=4, num_microbatches=32)
    assert found.step_s == pytest.approx(3 * 35)
    assert found.in_flight == ((32,),) * 4


def test_interleaving_divides_the_bubble_and_holds_more():
    stages = [passes(0.5)] * 8
    found = pipeline_times("Interleaved1F1B", stages, pp=4, num_microbatches=32)
    assert found.step_s == pytest.approx(3 * 32 + 3 * 3 / 2)
    assert sum(found.in_flight[0]) == 4 + 2 * 3 + 1


@pytest.mark.parametrize(("schedule", "windows"), [("ZB-1p", 1), ("ZB-2p", 2)])
def test_split_backward_is_faster_within_its_memory(schedule, windows):
    stages = [passes(1.0)] * 4
    plain = pipeline_times("1F1B", stages, pp=4, num_microbatches=24)
    split = pipeline_times(schedule, stages, pp=4, num_microbatches=24)
    assert 3 * 24 <= split.step_s < plain.step_s
    assert max(held for (held,) in split.in_flight) <= windows * 4
