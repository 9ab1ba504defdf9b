"""The solver is exact on a program that an earlier HiGHS solved wrongly in kind."""

import subprocess
import sys
from itertools import product
from pathlib import Path

import highspy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import SolverError
from planner.solver import (
    _WITHOUT_SPARSIFY,
    _WITHOUT_SUB_MIPS,
    Minimisation,
    is_chosen,
)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(2, 7), st.integers(1, 6))
def test_what_is_tried_without_integrality_is_solved_all_the_same(data, number, rows):
    """Covers: some are whole by themselves, some (of odd circles) are not."""
    costs = data.draw(st.lists(st.integers(1, 9), min_size=number, max_size=number))
    sets = st.sets(st.integers(0, number - 1), min_size=1, max_size=3)
    covered = data.draw(st.lists(sets, min_size=rows, max_size=rows))
    solutions = []
    for is_mostly_whole in (True, False):
        model = Minimisation("cover")
        taken = [model.binary() for _ in costs]
        for each in covered:
            model.at_most([], [(1.0, taken[at]) for at in each], constant=-1)
        model.add_cost(zip(map(float, costs), taken, strict=True))
        solutions.append(model.solve(most_checks=10_000, is_mostly_whole=is_mostly_whole))
        chosen = {at for at, variable in enumerate(taken) if is_chosen(variable)}
        assert all(chosen & each for each in covered)
        assert sum(costs[at] for at in chosen) == pytest.approx(solutions[-1].objective)
    assert solutions[0].objective == pytest.approx(solutions[1].objective)
    assert [solution.status for solution in solutions] == ["optimal"] * 2
    assert solutions[0].bound == pytest.approx(solutions[0].objective)


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


def test_the_solver_prints_nothing(capfd):
    """Not even its name: what `--json` writes is read by programs."""
    model = Minimisation("silent")
    model.add_cost([(1.0, model.binary())])
    model.solve(most_checks=10)
    assert capfd.readouterr() == ("", "")


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
    for name, value in {**_WITHOUT_SUB_MIPS, **_WITHOUT_SPARSIFY}.items():
        assert highspy.Highs().setOptionValue(name, value) == highspy.HighsStatus.kOk


def test_a_program_that_presolve_fails_on_is_solved_without_it():
    """Of HiGHS 1.15.1: three ways to cut two stages, which end in "Solve error" with presolve."""
    program = Minimisation("stages")
    longest, once = program.non_negative(), program.non_negative()
    used = program.binary()
    first = [program.binary() for _ in range(4)]
    second = [program.binary() for _ in range(4)]
    passes = [program.non_negative() for _ in range(4)]
    program.equal([(1.0, used)], constant=1)
    # Forward of each stage by its cut, and its backward, in whose last digits it lies.
    seconds = (
        (first, (5.666666666666667, 6.333333333333333, 9.0, 11.666666666666667)),
        (first, (11.333333333333336, 12.666666666666668, 18.000000000000002, 23.333333333333338)),
        (second, (11.666666666666667, 6.0, 5.333333333333333, 2.6666666666666666)),
        (second, (23.333333333333338, 12.000000000000002, 10.666666666666668, 5.333333333333334)),
    )
    for stage in (first, second):
        program.equal([(1.0, variable) for variable in stage], [(1.0, used)])
    for (stage, taken_ms), passed in zip(seconds, passes, strict=True):
        terms = [(10 * ms, variable) for ms, variable in zip(taken_ms, stage, strict=True)]
        program.equal(terms, [(1.0, passed)])
    for left, right in ((0, 1), (1, 2), (2, 3)):
        program.equal([(1.0, first[left])], [(1.0, second[right])])
    program.equal([(1.0, first[3])])
    program.equal([], [(1.0, second[0])])
    for paths in ((3, 3, 0, 0), (2, 3, 1, 1), (3, 2, 1, 1), *((1, 1, 3, 3),) * 3):
        program.at_most([*zip(paths, passes, strict=True)], [(1.0, longest)])
    for stage, step_s in ((first, (20, 40, 60, 80)), (second, (80, 60, 40, 20))):
        program.at_most([*zip(step_s, stage, strict=True)], [(1.0, once)])
    program.add_cost([(1.0, longest), (1.0, once)])
    assert program.solve(most_checks=100).objective == pytest.approx(710)


def test_a_program_that_presolve_never_ends_with_is_solved():
    """In a process of its own, since HiGHS hears nothing while it presolves."""
    script = Path(__file__).with_name("endless_presolve.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=60
    )
    assert float(done.stdout) == pytest.approx(2 * 59.746765894103795)
