"""Linear programs that rows join: each minimum is that of a program made anew."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.search.linear_program import LinearProgram
from planner.solver import NoSolutionError


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_linear_program_is_taken_up_where_it_was_left(data):
    """Rows join one by one; each minimum is that of a program made anew."""
    number = data.draw(st.integers(1, 4))
    coefficients = st.lists(st.integers(-9, 9), min_size=number, max_size=number)
    costs = np.array(data.draw(coefficients), float)
    rows = data.draw(st.lists(st.tuples(coefficients, st.integers(0, 20)), min_size=1, max_size=4))
    grown = LinearProgram(costs, np.full(number, 5.0))
    assert grown.minimise().cost == pytest.approx(5 * costs.clip(max=0).sum())
    for count, (row, most) in enumerate(rows, 1):
        grown.add_rows(np.array([row], float), np.array([most], float))
        anew = LinearProgram(costs, np.full(number, 5.0))
        anew.add_rows(
            np.array([each for each, _ in rows[:count]], float),
            np.array([limit for _, limit in rows[:count]], float),
        )
        found = grown.minimise()
        values = found.values
        assert found.cost == pytest.approx(anew.minimise().cost, abs=1e-6)
        assert all(values @ each <= limit + 1e-6 for each, limit in rows[:count])
        assert found.cost == pytest.approx(values @ costs, abs=1e-6)


def test_a_linear_program_without_a_feasible_point_is_an_error():
    program = LinearProgram(np.ones(2), np.ones(2))
    program.add_rows(np.ones((1, 2)), np.array([9.0]), np.array([3.0]))
    with pytest.raises(NoSolutionError):
        program.minimise()


@pytest.mark.parametrize(("iterations", "ends"), [(0, True), (10, False)])
def test_a_linear_program_that_goes_round_ends_without_an_optimum(iterations, ends, monkeypatch):
    monkeypatch.setattr("planner.search.linear_program._MOST_ITERATIONS", iterations)
    chance = np.random.default_rng(0)
    program = LinearProgram(-chance.random(20), np.full(20, 5.0))
    program.add_rows(chance.random((20, 20)), np.ones(20))  # presolve leaves these as they are
    assert (program.minimise() is None) == ends
