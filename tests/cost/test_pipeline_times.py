"""The time of a pipeline against a plain clock and closed forms."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.cost.pipeline import longest_path, pipeline_s, pipeline_times
from planner.strategy.schedules import actions_by_rank, schedule_rule

SHARED = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def clocked_s(schedule, pp, num_microbatches, forward_s, backward_s, weight_s):
    """The action list run as it stands: every action starts when it can."""
    stages = len(forward_s)
    lists = actions_by_rank(
        schedule, pp=pp, virtual_stages=stages // pp, num_microbatches=num_microbatches
    )
    takes = {
        "F": forward_s,
        "B": backward_s,
        "I": [b - w for b, w in zip(backward_s, weight_s, strict=True)],
        "W": weight_s,
    }
    clock, ends, counts = [0.0] * pp, {}, {}
    left = [list(row) for row in lists]
    while any(left):
        for rank, row in enumerate(left):
            if not row:
                continue
            stage, what = row[0]
            kind = "back" if what in "BI" else what
            number = counts.get((stage, kind), 0)
            needs = None
            if what == "F" and stage > 0:
                needs = (stage - 1, "F", number)
            elif kind == "back":
                needs = (stage, "F", number)
                needs = needs if stage == stages - 1 else (stage + 1, "back", number)
            if needs is not None and needs not in ends:
                continue
            start = max(clock[rank], ends.get(needs, 0.0))
            clock[rank] = start + takes[what][stage]
            ends[stage, kind, number] = clock[rank]
            counts[stage, kind] = number + 1
            row.pop(0)
    return max(clock)


seconds = st.floats(0.1, 3.0)


@st.composite
def pipelines(draw, *, most_microbatches):
    schedule = draw(st.sampled_from(["GPipe", "1F1B", *SHARED]))
    pp = draw(st.integers(2, 5))
    virtual_stages = draw(st.integers(2, 4)) if schedule in SHARED[:2] else 1
    number = draw(st.integers(pp, most_microbatches))
    if schedule in SHARED[:2]:
        number -= number % pp
    elif schedule in SHARED:
        virtual_stages, number = 2, max(number, 2 * pp)
    stages = pp * virtual_stages
    alike = draw(st.booleans())
    pool = draw(st.lists(seconds, min_size=1, max_size=2)) if alike else None
    times = st.sampled_from(pool) if pool else seconds
    forward = draw(st.lists(times, min_size=stages, max_size=stages))
    backward = draw(st.lists(times, min_size=stages, max_size=stages))
    share = draw(st.sampled_from([0.0, 0.3, 0.5, 1.0]))
    return schedule, pp, number, forward, backward, [share * each for each in backward]


def parts(forward, backward, weight):
    return {"forward_s": forward, "backward_s": backward, "weight_backward_s": weight}


@settings(max_examples=250)
@given(pipelines(most_microbatches=400))
def test_the_time_is_that_of_the_whole_list(pipeline):
    schedule, pp, number, *times = pipeline
    found = pipeline_s(schedule, pp=pp, num_microbatches=number, **parts(*times))
    assert found == pytest.approx(clocked_s(*pipeline), rel=1e-10)


@given(pipelines(most_microbatches=40), st.data())
def test_the_longest_path_sets_the_time_and_bounds_every_other(pipeline, data):
    schedule, pp, number, *times = pipeline
    size = {"schedule": schedule, "pp": pp, "num_microbatches": number}
    path = longest_path(**size, **parts(*times))
    whole_s = pipeline_s(**size, **parts(*times))
    assert path.seconds(*times) == pytest.approx(whole_s, rel=1e-10)
    stages = len(times[0])
    forward, backward = (
        data.draw(st.lists(seconds, min_size=stages, max_size=stages)) for _ in "fb"
    )
    others = forward, backward, [0.4 * each for each in backward]
    other_s = pipeline_s(**size, **parts(*others))
    assert path.seconds(*others) <= other_s * (1 + 1e-10)


@given(pipelines(most_microbatches=40), st.data())
def test_a_longer_action_is_never_faster(pipeline, data):
    schedule, pp, number, forward, backward, weight = pipeline
    size = {"schedule": schedule, "pp": pp, "num_microbatches": number}
    before = pipeline_s(**size, **parts(forward, backward, weight))
    stage = data.draw(st.integers(0, len(forward) - 1))
    backward[stage] += data.draw(seconds)
    after = pipeline_s(**size, **parts(forward, backward, weight))
    assert after >= before * (1 - 1e-12)


@given(st.integers(2, 5), st.integers(0, 20), seconds)
def test_parts_of_equal_length_leave_next_to_no_bubble(pp, more, part):
    """Qi et al., section 6: a V of stages whose forward, and both parts of whose backward, take
    the same is idle for its first forwards alone."""
    number = 2 * pp + more
    times = parts([part] * 2 * pp, [2 * part] * 2 * pp, [part] * 2 * pp)
    found = pipeline_s("ZBVZeroBubble", pp=pp, num_microbatches=number, **times)
    assert found <= (6 * number + 3 * (pp - 1)) * part * (1 + 1e-9)


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
