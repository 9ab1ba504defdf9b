"""What each rank holds, joined: exact against enumeration, and equal to the ILP over the same."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_stage_ilp import column, configuration

from planner.search import combination
from planner.search.columns import placed, step_time_s
from planner.search.combination import best_combination
from planner.search.stage_ilp import StageProblem, solve_stages
from planner.solver import Effort
from planner.vocabulary import SHARED_SCHEDULES


@st.composite
def instances(draw):
    """Ranks of two or three stages, each choice with times of its own; lengths of 1 to 3."""
    pp, virtual_stages = draw(st.sampled_from([(2, 2), (2, 3), (3, 2)]))
    held = [
        [
            tuple(
                column(
                    0,
                    draw(st.integers(1, 3)),
                    draw(st.floats(1e-3, 5e-3)),
                    draw(st.floats(0, 2e-3)),
                    1.0,
                    1,
                    forward_share=draw(st.floats(0.2, 0.5)),
                    weight_share=draw(st.floats(0.0, 1.0)),
                )
                for _ in range(virtual_stages)
            )
            for _ in range(draw(st.integers(1, 5)))
        ]
        for _ in range(pp)
    ]
    num_units = draw(st.integers(pp * virtual_stages, 3 * pp * virtual_stages))
    microbatches = pp * draw(st.integers(1, 4))
    config = configuration(pp, virtual_stages, microbatches)
    shared = (
        SHARED_SCHEDULES if virtual_stages == 2 and microbatches >= 2 * pp else [config.schedule]
    )
    return replace(config, schedule=draw(st.sampled_from(shared))), held, num_units


def search_of(config, num_units):
    return SimpleNamespace(configuration=config, num_units=num_units, once_s=0.0)


def enumerated_s(config, held, num_units):
    best = float("inf")
    for chosen in product(*held):
        pp = config.degrees.pp
        columns = [chosen[config.rank_of(s)][s // pp] for s in range(config.num_stages)]
        if sum(each.end - each.first for each in columns) == num_units:
            best = min(best, step_time_s(config, columns))
    return best


@settings(max_examples=150, deadline=None)
@given(instances())
def test_it_equals_enumeration(instance):
    config, held, num_units = instance
    best_s = enumerated_s(config, held, num_units)
    found = best_combination(search_of(config, num_units), held, 1.0)
    if best_s == float("inf"):
        assert found.partition is None
        assert found.bound_s == 1.0
        return
    assert found.partition.objective_s == pytest.approx(best_s, rel=1e-6)
    assert found.bound_s == pytest.approx(best_s, rel=1e-6)
    columns = found.partition.columns
    assert list(columns) == list(placed(columns))
    assert columns[-1].end == num_units


@settings(max_examples=30, deadline=None)
@given(instances())
def test_the_ilp_over_the_same_choices_agrees(instance):
    config, held, num_units = instance
    if enumerated_s(config, held, num_units) == float("inf"):
        return
    problem = StageProblem(
        configuration=config,
        choices=tuple(tuple(choices) for choices in held),
        room_bytes=None,
        num_units=num_units,
    )
    assert problem.by_rank
    solution = solve_stages([problem], scale_s=0.1, effort=Effort(most_checks=10**6))
    found = best_combination(search_of(config, num_units), held, 1.0)
    if solution.status == "optimal":
        assert solution.objective_s == pytest.approx(found.partition.objective_s, rel=1e-5)
    assert solution.bound_s <= found.partition.objective_s * (1 + 1e-6)


@settings(max_examples=30, deadline=None)
@given(instances(), st.floats(0.5, 1.5))
def test_a_limit_leaves_out_what_is_no_faster(instance, share):
    config, held, num_units = instance
    best_s = enumerated_s(config, held, num_units)
    if best_s == float("inf"):
        return
    limit_s = share * best_s
    found = best_combination(search_of(config, num_units), held, limit_s)
    assert found.bound_s <= best_s * (1 + 1e-6)
    if found.partition is None:
        assert best_s * (1 + 1e-6) >= limit_s
    else:
        assert found.partition.objective_s == pytest.approx(best_s, rel=1e-6)


def test_too_many_choices_are_not_enumerated(monkeypatch):
    config = configuration(2, 2, 4)
    held = [[(column(0, 1, 1e-3, 0.0, 1.0, 1), column(0, 1, 1e-3, 0.0, 1.0, 1))] * 4] * 2
    assert best_combination(search_of(config, 4), held, 1.0) is not None
    monkeypatch.setattr(combination, "_MOST_JOINS", 10)
    assert best_combination(search_of(config, 4), held, 1.0) is None
