import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.zero_bubble import SplitPipeline, zero_bubble_s


def pipeline(
    times: tuple[float, float, float], *, ranks: int, num_microbatches: int, windows: int
) -> SplitPipeline:
    forward_s, input_s, weight_s = times
    return zero_bubble_s(
        forward_s=[forward_s] * ranks,
        input_backward_s=[input_s] * ranks,
        weight_backward_s=[weight_s] * ranks,
        num_microbatches=num_microbatches,
        limit=windows * ranks,
    )


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_with_equal_parts_the_bubble_is_that_of_the_handcrafted_schedules(ranks: int) -> None:
    # Qi et al. 2024, table 2: (p - 1)(F + B - W) for ZB-H1 and (p - 1)(F + B - 2 W) for ZB-H2.
    for windows, bubble_s in ((1, ranks - 1), (2, 0)):
        found = pipeline((1, 1, 1), ranks=ranks, num_microbatches=3 * ranks, windows=windows)
        assert found.step_s == pytest.approx(9 * ranks + bubble_s)


@pytest.mark.parametrize(
    ("windows", "num_microbatches", "published"),
    [(1, 24, 0.1585), (1, 64, 0.0674), (2, 24, 0.0433), (2, 32, 0.0039), (2, 64, 0.0026)],
)
def test_bubble_rates_of_the_1_5b_model_are_those_published(
    windows: int, num_microbatches: int, published: float
) -> None:
    # Table 5 there. W is half of F and of B, which the unfused attention is part of.
    times = (2, 2, 1)
    found = pipeline(times, ranks=8, num_microbatches=num_microbatches, windows=windows)
    rate = 1 - num_microbatches * sum(times) / found.step_s
    assert rate == pytest.approx(published, abs=0.03)


def test_a_rank_holds_no_more_than_the_limit() -> None:
    found = pipeline((3, 2, 2), ranks=4, num_microbatches=20, windows=2)
    assert max(found.in_flight) == 8


def test_one_rank_has_no_bubble() -> None:
    assert pipeline((3, 2, 1), ranks=1, num_microbatches=5, windows=1).step_s == pytest.approx(30)


def test_the_slowest_rank_sets_the_pace() -> None:
    found = zero_bubble_s(
        forward_s=[1, 1, 2],
        input_backward_s=[1, 1, 2],
        weight_backward_s=[1, 1, 2],
        num_microbatches=30,
        limit=6,
    )
    assert found.step_s == pytest.approx(30 * 6, rel=0.02)


times = st.floats(0.5, 2.0)


@given(
    parts=st.lists(st.tuples(times, times, times), min_size=1, max_size=6),
    num_microbatches=st.integers(1, 20),
    windows=st.integers(1, 2),
)
def test_no_step_is_shorter_than_the_work_of_the_busiest_rank(
    parts: list[tuple[float, float, float]], num_microbatches: int, windows: int
) -> None:
    found = zero_bubble_s(
        forward_s=[forward_s for forward_s, _, _ in parts],
        input_backward_s=[input_s for _, input_s, _ in parts],
        weight_backward_s=[weight_s for _, _, weight_s in parts],
        num_microbatches=num_microbatches,
        limit=windows * len(parts),
    )
    busiest_s = num_microbatches * max(sum(rank) for rank in parts)
    assert found.step_s >= busiest_s * (1 - 1e-9)
    # One microbatch after the other is the slowest order.
    assert found.step_s <= num_microbatches * sum(sum(rank) for rank in parts) * (1 + 1e-9)
    assert all(1 <= held <= windows * len(parts) for held in found.in_flight)
