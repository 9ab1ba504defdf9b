"""Recomputations of many blocks that differ, against all choices."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.search import knapsack_choices
from planner.search.knapsack import Knapsack, Limit, Section
from planner.search.knapsack_choices import fastest

SECONDS = st.integers(0, 20).map(float) | st.floats(0, 20)
KEPT = st.integers(0, 20).map(float) | st.integers(0, 20 << 20).map(lambda parts: parts / 2**20)
"""Of a byte there are no smaller parts, and its worth in seconds is a number."""
MOST = st.integers(-5 << 10, 90 << 10).map(lambda parts: parts / 2**10)


@st.composite
def problems(draw):
    """What few blocks in sections take and keep by kind, and what they may keep."""
    shape = draw(st.integers(1, 5)), draw(st.integers(2, 3))

    def numbers(values):
        each = draw(st.lists(values, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
        return np.array(each).reshape(shape)

    starts = draw(st.sets(st.integers(1, shape[0]), max_size=shape[0]))
    sections = [
        Section(
            blocks=range(*each), left=draw(st.integers(-4, 8)) * 1.0, come=draw(st.integers(0, 4))
        )
        for each in pairwise(sorted({0, *starts, shape[0]}))
    ]
    number = draw(st.integers(1, 3))
    limits = [
        Limit(
            each=draw(st.sampled_from([0.0, 1.0, 1.5, 3.0])),
            goes=draw(st.booleans()),
            most=numbers(MOST),
        )
        for _ in range(number)
    ]
    limits = [each for each in limits if each.each >= 1 or not each.goes] or [
        Limit(each=1.0, goes=True, most=numbers(MOST))
    ]
    kept = numbers(KEPT)
    return Knapsack(
        seconds=numbers(SECONDS), kept=kept, sizes=kept, sections=sections, limits=limits
    )


def fits(problem, kinds, rounding=0.0):
    """Whether a choice is within all limits."""
    kept = [problem.sizes[block, kind] for block, kind in enumerate(kinds)]
    for place, section in enumerate(problem.sections):
        gone = sum(
            max(0.0, sum(kept[block] for block in each.blocks) - each.left) - each.come
            for each in problem.sections[place + 1 :]
        )
        for limit in problem.limits:
            held = limit.each * sum(kept) - limit.goes * gone
            if any(held > limit.most[block, kinds[block]] + rounding for block in section.blocks):
                return False
    return True


def all_s(problem):
    """What each choice takes that fits."""
    number, kinds = problem.seconds.shape
    for choice in product(range(kinds), repeat=number):
        if fits(problem, choice):
            yield sum(problem.seconds[block, kind] for block, kind in enumerate(choice))


@given(problems(), st.sampled_from([0.0, 0.5]), st.sampled_from([(1, 2), (60, 6000)]))
def test_no_choice_is_faster(problem, tolerance_s, states):
    least_s = min(all_s(problem), default=None)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(knapsack_choices, "_MOST_STATES", states)
        found = fastest(problem, tolerance_s=tolerance_s)
    if found is None:
        assert least_s is None or states == (1, 2)
        return
    assert least_s is not None
    assert fits(problem, found.kinds, rounding=1e-9)
    rows = np.arange(len(found.kinds))
    assert found.seconds == pytest.approx(problem.seconds[rows, found.kinds].sum())
    assert found.least_s <= least_s + 1e-9
    if states[1] > 2:  # all were looked at
        assert found.seconds <= least_s + tolerance_s + 1e-9
        assert found.least_s >= least_s - tolerance_s - 1e-9
