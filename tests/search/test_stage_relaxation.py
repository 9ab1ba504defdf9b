"""The linear relaxation of a configuration: below every choice, and exact where there is none."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instances import clusters, configurations, enumerated_s, models, search_of
from test_combination import enumerated_s as enumerated_joins_s
from test_combination import instances
from test_stage_ilp import enumerated_s as enumerated_problem_s
from test_stage_ilp import problems

from planner.search.bounds import bounding_paths
from planner.search.columns import step_time_s
from planner.search.stage_ilp import StageProblem
from planner.search.stage_problem import stage_problem
from planner.search.stage_relaxation import relaxed


@settings(max_examples=60)
@given(models(), clusters(), st.sampled_from([1.001, 1.3, 10.0]))
def test_no_choice_of_a_configuration_is_faster(model, cluster, factor):
    for configuration in configurations(model):
        if configuration.virtual_stages > 1 and configuration.num_microbatches < 100:
            search = search_of(model, configuration, cluster)
            best_s = enumerated_s(search)
            if best_s == float("inf"):
                continue
            problem = stage_problem(search, best_s * factor)
            assert relaxed(problem, best_s * factor).bound_s <= best_s * (1 + 1e-6)


@settings(max_examples=60, deadline=None)
@given(problems(virtual_stages=2))
def test_no_stages_with_a_room_of_their_rank_are_faster(problem):
    best_s = enumerated_problem_s(problem)
    if best_s < float("inf"):
        assert relaxed(problem, 2 * best_s).bound_s <= best_s * (1 + 1e-6)


@settings(max_examples=100, deadline=None)
@given(instances())
def test_no_join_of_what_ranks_hold_is_faster(instance):
    configuration, held, num_units = instance
    best_s = enumerated_joins_s(configuration, held, num_units)
    found = relaxed(problem_of(configuration, held, num_units), 1.0)
    assert found.bound_s <= best_s * (1 + 1e-6)


@settings(max_examples=100, deadline=None)
@given(instances())
def test_with_nothing_to_choose_it_is_the_step(instance):
    """Paths join until none is longer: not those of the bounds alone."""
    configuration, held, _ = instance
    single = [choices[:1] for choices in held]
    pp = configuration.degrees.pp
    columns = [
        single[configuration.rank_of(stage)][0][stage // pp]
        for stage in range(configuration.num_stages)
    ]
    units = sum(column.end - column.first for column in columns)
    found = relaxed(problem_of(configuration, single, units), 1.0)
    assert found.bound_s == pytest.approx(step_time_s(configuration, columns), rel=2e-5)
    assert not set(found.paths) & set(bounding_paths(configuration))


@settings(max_examples=20, deadline=None)
@given(instances())
def test_what_cannot_add_up_has_no_bound(instance):
    configuration, held, _ = instance
    most = sum(max(sum(c.end - c.first for c in each) for each in choices) for choices in held)
    assert relaxed(problem_of(configuration, held, most + 1), 1.0).bound_s == float("inf")


def problem_of(configuration, held, num_units):
    return StageProblem(
        configuration=configuration,
        choices=tuple(tuple(choices) for choices in held),
        room_bytes=None,
        num_units=num_units,
    )
