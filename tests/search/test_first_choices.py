"""First choices of interleaved stages: they fit, and their step is that of their action list."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from instances import clusters, configurations, enumerated_s, models, search_of

from planner.search.columns import step_time_s
from planner.search.first_choices import FirstChoices


def shared(model, cluster):
    for configuration in configurations(model):
        if configuration.virtual_stages > 1 and configuration.num_microbatches < 100:
            yield search_of(model, configuration, cluster)


def demand_legal(search, partition):
    configuration, columns = search.configuration, partition.columns
    assert [columns[0].first, columns[-1].end] == [0, search.num_units]
    assert all(before.end == behind.first for before, behind in pairwise(columns))
    assert partition.objective_s == pytest.approx(step_time_s(configuration, columns), rel=1e-9)
    for rank in range(configuration.degrees.pp):
        assert search.fits(rank, [columns[stage] for stage in configuration.stages_of(rank)])


@settings(max_examples=60)
@given(models(), clusters())
def test_they_fit_and_no_move_makes_them_worse(model, cluster):
    for search in shared(model, cluster):
        choices = FirstChoices(search)
        first = choices.first()
        if first is None:
            continue
        demand_legal(search, first)
        better = choices.better(first, moves=5)
        demand_legal(search, better)
        best_s = enumerated_s(search)
        assert best_s * (1 - 1e-9) <= better.objective_s <= first.objective_s * (1 + 1e-9)
