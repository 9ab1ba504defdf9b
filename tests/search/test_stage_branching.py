"""Branching on what holds steps up: exact against enumeration, quick where units do not divide."""

import time
from itertools import product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_combination import enumerated_s as enumerated_joins_s
from test_combination import instances
from test_stage_ilp import column, configuration, enumerated_s, fits, problems
from test_stage_relaxation import problem_of

from planner.search.columns import step_time_s
from planner.search.stage_branching import branched
from planner.search.stage_ilp import StageProblem
from planner.search.stage_relaxation import relaxed
from planner.solver import Effort

ENOUGH = Effort(most_checks=10**9)


def decided(problem, limit_s, effort=ENOUGH):
    return branched(problem, limit_s, fits=lambda columns: fits(problem, columns), effort=effort)


def assert_is_best(found, problem, best_s, limit_s):
    if best_s >= limit_s:
        assert found.partition is None
        assert found.bound_s == limit_s
        return
    assert found.partition.objective_s == pytest.approx(best_s, rel=1e-6)
    assert found.bound_s == pytest.approx(best_s, rel=1e-6)
    columns = found.partition.columns
    assert step_time_s(problem.configuration, columns) == found.partition.objective_s
    assert fits(problem, columns)
    assert [each.first for each in columns[1:]] == [each.end for each in columns[:-1]]


@settings(max_examples=100, deadline=None)
@given(instances(), st.sampled_from([0.99, 1.01, 10.0]))
def test_what_ranks_hold_equals_enumeration(instance, factor):
    held_by_configuration, held, num_units = instance
    problem = problem_of(held_by_configuration, held, num_units)
    best_s = enumerated_joins_s(held_by_configuration, held, num_units)
    limit_s = 1.0 if best_s == inf else factor * best_s
    found = decided(problem, limit_s)
    assert_is_best(found, problem, best_s, limit_s)
    if found.partition is not None:
        assert found.partition.columns[-1].end == num_units


@settings(max_examples=40, deadline=None)
@given(problems(virtual_stages=2), st.sampled_from([0.99, 1.01, 10.0]))
def test_stages_that_share_a_room_equal_enumeration(problem, factor):
    """What fits no room exactly is left out, too, though the program has a row for it."""
    best_s = enumerated_s(problem)
    limit_s = 1.0 if best_s == inf else factor * best_s
    assert_is_best(decided(problem, limit_s), problem, best_s, limit_s)


@settings(max_examples=60, deadline=None)
@given(instances(), st.integers(0, 20))
def test_with_little_work_it_tells_a_bound(instance, most_checks):
    held_by_configuration, held, num_units = instance
    best_s = enumerated_joins_s(held_by_configuration, held, num_units)
    if best_s == inf:
        return
    problem = problem_of(held_by_configuration, held, num_units)
    found = decided(problem, 2 * best_s, Effort(most_checks=most_checks))
    assert found.bound_s <= best_s * (1 + 1e-6)
    if found.partition is not None:
        assert found.partition.objective_s >= best_s * (1 - 1e-6)


def test_where_the_solver_comes_to_no_end_nothing_is_proven(monkeypatch):
    """Single choices that no program told anything of stay open."""
    monkeypatch.setattr("planner.search.stage_branching.StageProgram.solve", lambda self: None)
    problem = undivided(pp=2, virtual_stages=2, num_units=5)
    found = decided(problem, 10.0)
    assert found.partition is None
    assert found.bound_s == 0.0


def test_paths_that_raise_no_bound_end(monkeypatch):
    """A path that the solver holds to within its tolerance only would join for ever."""
    monkeypatch.setattr(
        "planner.search.stage_branching.StageProgram.tighten", lambda self, found, enough: True
    )
    problem = undivided(pp=2, virtual_stages=2, num_units=5)
    best_s = min(
        step_time_s(problem.configuration, [choice[0] for choice in chosen])
        for chosen in product(*problem.choices)
        if sum(choice[0].end - choice[0].first for choice in chosen) == 5
    )
    assert decided(problem, 10.0).partition.objective_s == pytest.approx(best_s)


def test_it_ends_with_the_deadline():
    problem = undivided()
    found = decided(problem, 10.0, Effort(most_checks=10**9, deadline_s=time.monotonic() - 1))
    assert found.partition is None
    assert found.bound_s == 0.0


def test_units_that_do_not_divide_are_decided_with_little_work():
    """33 units on 8 ranks of 4 stages: some rank holds 5, which a mean of 4.125 does not say."""
    problem = undivided()
    best = decided(problem, 10.0, Effort(most_checks=100)).partition
    assert best is not None
    limit_s = best.objective_s * (1 - 1e-6)
    assert relaxed(problem, limit_s).bound_s < limit_s * 0.95
    assert decided(problem, limit_s, Effort(most_checks=30)).bound_s == limit_s


def undivided(*, pp=8, virtual_stages=4, num_units=33):
    choices = tuple(
        tuple((column(0, units, units * 1e-3, 0.0, 1.0, 1),) for units in (1, 2))
        for _ in range(pp * virtual_stages)
    )
    return StageProblem(
        configuration=configuration(pp, virtual_stages, pp),
        choices=choices,
        room_bytes=None,
        num_units=num_units,
    )
