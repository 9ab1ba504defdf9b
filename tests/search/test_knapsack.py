"""Recomputations of many blocks that differ, against all choices and against fronts."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from instances import clusters, configurations, models, search_of

from planner.cost import sections
from planner.cost.sections import Sections
from planner.search import knapsack
from planner.search.knapsack import fastest

SECONDS = st.integers(0, 20).map(float) | st.floats(0, 20)
KEPT = st.integers(0, 20).map(float) | st.integers(0, 20 << 20).map(lambda parts: parts / 2**20)
"""Of a byte there are no smaller parts, and its worth in seconds is a number."""


@st.composite
def problems(draw):
    """What few blocks take and keep by kind, and what they may keep."""
    shape = draw(st.integers(1, 5)), draw(st.integers(2, 3))

    def numbers(values):
        each = draw(st.lists(values, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
        return np.array(each).reshape(shape)

    return numbers(SECONDS), numbers(KEPT), numbers(st.floats(-5, 60))


def all_s(seconds, kept, most):
    """What each choice takes that fits."""
    rows = np.arange(len(seconds))
    for kinds in product(range(seconds.shape[1]), repeat=len(seconds)):
        if kept[rows, kinds].sum() <= most[rows, kinds].min():
            yield float(seconds[rows, kinds].sum())


@given(problems(), st.sampled_from([0.0, 0.5]), st.sampled_from([2, 6000]))
def test_no_choice_is_faster(problem, tolerance_s, states):
    seconds, kept, most = problem
    least_s = min(all_s(*problem), default=None)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(knapsack, "_MOST_STATES", states)
        found = fastest(seconds, kept, most, tolerance_s=tolerance_s)
    if least_s is None:
        assert found is None
        return
    rows = np.arange(len(seconds))
    assert kept[rows, found.kinds].sum() <= most[rows, found.kinds].min() + 1e-9
    assert found.seconds == pytest.approx(seconds[rows, found.kinds].sum())
    assert found.least_s <= least_s + 1e-9
    if states > 2:  # all were looked at
        assert found.seconds <= least_s + tolerance_s + 1e-9
        assert found.least_s >= least_s - tolerance_s - 1e-9


def in_one(own, first, end):
    """As of a run of many kinds of blocks, nothing of which counts as gone before others."""
    blocks = own._blocks(first, end)
    return [blocks] if blocks else []


@given(st.data(), models(), clusters())
def test_a_recomputation_is_as_fast_as_that_of_fronts(data, model, cluster):
    piped = [each for each in configurations(model) if each.virtual_stages == 1]
    assume(piped)
    configuration = data.draw(st.sampled_from(piped))
    search, other = (search_of(model, configuration, cluster) for _ in range(2))
    for stage in range(configuration.num_stages):
        for first, end in combinations(range(search.num_units + 1), 2):
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(Sections, "of", in_one)
                exact = search.column(stage, first, end)
                patched.setattr(sections, "MOST_STRUCTURES", 0)
                found = other.column(stage, first, end)
            if exact is None:
                assert found is None
                continue
            run_s = search.least_s(first, end)
            assert other.fits(stage, [found])
            assert found.mix.recompute_s >= exact.mix.recompute_s * (1 - 1e-9)
            assert found.mix.recompute_s <= exact.mix.recompute_s + 2e-6 * run_s
    assert other.maker.share_off <= 2e-6
