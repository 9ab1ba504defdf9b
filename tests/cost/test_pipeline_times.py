"""The time of a pipeline against a plain clock and closed forms."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.cost.pipeline import longest_path, pipeline_s, pipeline_times
from planner.strategy.schedules import actions_by_rank, schedule_rule


def clocked_s(schedule, pp, num_microbatches, forward_s, backward_s):
    """The action list run as it stands: every action starts when it can."""
    stages = len(forward_s)
    lists = actions_by_rank(
        schedule, pp=pp, virtual_stages=stages // pp, num_microbatches=num_microbatches
    )
    clock, ends, counts = [0.0] * pp, {}, {}
    left = [list(row) for row in lists]
    while any(left):
        for rank, row in enumerate(left):
            if not row:
                continue
            stage, forward = row[0]
            number = counts.get((stage, forward), 0)
            if forward:
                needs = None if stage == 0 else (stage - 1, True, number)
            else:
                needs = (stage, True, number)
                needs = needs if stage == stages - 1 else (stage + 1, False, number)
            if needs is not None and needs not in ends:
                continue
            start = max(clock[rank], ends.get(needs, 0.0))
            clock[rank] = start + (forward_s if forward else backward_s)[stage]
            ends[stage, forward, number] = clock[rank]
            counts[stage, forward] = number + 1
            row.pop(0)
    return max(clock)


seconds = st.floats(0.1, 3.0)


@st.composite
def pipelines(draw, *, most_microbatches):
    schedule = draw(st.sampled_from(["GPipe", "1F1B", "Interleaved1F1B"]))
    pp = draw(st.integers(2, 5))
    virtual_stages = draw(st.integers(2, 4)) if schedule == "Interleaved1F1B" else 1
    number = draw(st.integers(pp, most_microbatches))
    if schedule == "Interleaved1F1B":
        number -= number % pp
    stages = pp * virtual_stages
    alike = draw(st.booleans())
    pool = draw(st.lists(seconds, min_size=1, max_size=2)) if alike else None
    times = st.sampled_from(pool) if pool else seconds
    forward = draw(st.lists(times, min_size=stages, max_size=stages))
    backward = draw(st.lists(times, min_size=stages, max_size=stages))
    return schedule, pp, number, forward, backward


@settings(max_examples=150)
@given(pipelines(most_microbatches=400))
def test_the_time_is_that_of_the_whole_list(pipeline):
    schedule, pp, number, forward, backward = pipeline
    found = pipeline_s(
        schedule, pp=pp, num_microbatches=number, forward_s=forward, backward_s=backward
    )
    assert found == pytest.approx(clocked_s(*pipeline), rel=1e-10)


@given(pipelines(most_microbatches=40), st.data())
def test_the_longest_path_sets_the_time_and_bounds_every_other(pipeline, data):
    schedule, pp, number, forward, backward = pipeline
    size = {"schedule": schedule, "pp": pp, "num_microbatches": number}
    path = longest_path(**size, forward_s=forward, backward_s=backward)
    whole_s = pipeline_s(**size, forward_s=forward, backward_s=backward)
    assert path.seconds(forward, backward) == pytest.approx(whole_s, rel=1e-10)
    others = [
        data.draw(st.lists(seconds, min_size=len(forward), max_size=len(forward))) for _ in "fb"
    ]
    other_s = pipeline_s(**size, forward_s=others[0], backward_s=others[1])
    assert path.seconds(*others) <= other_s * (1 + 1e-10)


@given(pipelines(most_microbatches=40), st.data())
def test_a_longer_action_is_never_faster(pipeline, data):
    schedule, pp, number, forward, backward = pipeline
    before = pipeline_s(
        schedule, pp=pp, num_microbatches=number, forward_s=forward, backward_s=backward
    )
    stage = data.draw(st.integers(0, len(forward) - 1))
    backward[stage] += data.draw(seconds)
    after = pipeline_s(
        schedule, pp=pp, num_microbatches=number, forward_s=forward, backward_s=backward
    )
    assert after >= before * (1 - 1e-12)


@given(st.integers(2, 6), st.integers(1, 200), seconds, seconds)
def test_even_stages_take_m_plus_p_minus_1_microbatches(pp, number, forward, backward):
    for schedule in ("1F1B", "GPipe"):
        if schedule_rule(schedule, pp=pp, virtual_stages=1, num_microbatches=number) is None:
            found = pipeline_s(
                schedule, pp=pp, num_microbatches=number,
                forward_s=[forward] * pp, backward_s=[backward] * pp,
            )  # fmt: skip
            assert found == pytest.approx((number + pp - 1) * (forward + backward))


@given(st.integers(2, 6), st.integers(1, 30), st.integers(2, 4), seconds, seconds)
def test_interleaving_divides_the_bubble(pp, rounds, virtual_stages, forward, backward):
    assume(backward >= forward)
    stages = pp * virtual_stages
    times = pipeline_times(
        "Interleaved1F1B", pp=pp, num_microbatches=rounds * pp,
        forward_s=[forward] * stages, backward_s=[backward] * stages,
    )  # fmt: skip
    expected = (rounds * pp * virtual_stages + pp - 1) * (forward + backward)
    assert times.step_s == pytest.approx(expected)


def test_thousands_of_microbatches_cost_no_more_than_a_few():
    found = pipeline_s(
        "1F1B", pp=16, num_microbatches=1_000_000, forward_s=[1.0] * 16, backward_s=[2.0] * 16
    )
    assert found == pytest.approx(3.0 * (1_000_000 + 15))


@pytest.mark.parametrize("num_microbatches", [1, 7, 50])
def test_one_rank_has_no_bubble(num_microbatches):
    times = pipeline_times(
        "none", pp=1, num_microbatches=num_microbatches, forward_s=[1.0], backward_s=[2.0]
    )
    assert times.step_s == 3 * num_microbatches


@pytest.mark.parametrize(("schedule", "windows"), [("ZB-1p", 1), ("ZB-2p", 2)])
def test_split_backward_is_faster_within_its_memory(schedule, windows):
    def times(name):
        return pipeline_times(
            name, pp=4, num_microbatches=24,
            forward_s=[1.0] * 4, backward_s=[2.0] * 4, weight_backward_s=[1.0] * 4,
        )  # fmt: skip

    assert 3 * 24 <= times(schedule).step_s < times("1F1B").step_s
    assert max(times(schedule).in_flight) <= windows * 4
