"""The solver is exact on a program that an earlier HiGHS solved wrongly in kind."""

from itertools import product

import highspy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import SolverError
from planner.solver import _WITHOUT_SUB_MIPS, Minimisation, is_chosen


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=3, max_size=9),
    st.integers(1, 100),
)
def test_a_knapsack_equals_enumeration(items, room):
    model = Minimisation("knapsack")
    chosen = [model.binary() for _ in items]
    model.at_most([(float(w), x) for (_, w), x in zip(items, chosen, strict=True)], constant=room)
    model.add_cost((-float(v), x) for (v, _), x in zip(items, chosen, strict=True))
    solution = model.solve(most_checks=10_000)
    best = max(
        sum(v for (v, _), take in zip(items, takes, strict=True) if take)
        for takes in product((0, 1), repeat=len(items))
        if sum(w for (_, w), take in zip(items, takes, strict=True) if take) <= room
    )
    assert solution.objective == pytest.approx(-best)
    assert solution.bound == pytest.approx(-best)
    assert solution.status == "optimal"
    taken = sum(v for (v, _), x in zip(items, chosen, strict=True) if is_chosen(x))
    assert taken == best


def test_a_min_max_is_exact():
    model = Minimisation("makespan")
    jobs = [7, 7, 6, 6, 5, 5, 4, 4, 4]
    longest = model.non_negative()
    assigned = [[model.binary() for _ in range(3)] for _ in jobs]
    for row in assigned:
        model.equal([(1.0, x) for x in row], constant=1)
    for machine in range(3):
        model.at_most(
            [(float(t), row[machine]) for t, row in zip(jobs, assigned, strict=True)],
            [(1.0, longest)],
        )
    model.add_cost([(1.0, longest)])
    assert model.solve(most_checks=10_000).objective == pytest.approx(16)
    assert longest.value() == pytest.approx(16)


def test_no_feasible_point_is_an_error():
    model = Minimisation("impossible")
    x = model.binary()
    model.equal([(1.0, x)], constant=2)
    model.add_cost([(1.0, x)])
    with pytest.raises(SolverError, match="no solution"):
        model.solve(most_checks=10_000)


def test_highs_knows_the_options_that_are_set():
    """It ignores others without an error."""
    for name, value in _WITHOUT_SUB_MIPS.items():
        assert highspy.Highs().setOptionValue(name, value) == highspy.HighsStatus.kOk
