"""What is told of runs before they are priced, against all partitions."""

from itertools import combinations, pairwise

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st
from instances import clusters, configurations, models, search_of

from planner.search.partition import columns_below
from planner.search.reach import Reach, RunRecomputation


@st.composite
def searches(draw):
    """Configurations with one stage per rank, and all their partitions that fit."""
    model = draw(models())
    piped = [
        each
        for each in configurations(model)
        if each.virtual_stages == 1 and 1 < each.degrees.pp <= len(model.units)
    ]
    assume(piped)
    search = search_of(model, draw(st.sampled_from(piped)), draw(clusters()))
    stages, number = search.configuration.num_stages, search.num_units
    found = []
    for cuts in combinations(range(1, number), stages - 1):
        runs = pairwise((0, *cuts, number))
        columns = [search.column(stage, *run) for stage, run in enumerate(runs)]
        if None not in columns:
            found.append(search.partition(columns))
    return search, found


@given(searches(), st.booleans())
def test_no_partition_is_faster_than_the_bound(known, recomputes):
    search, partitions = known
    reach = Reach(search, float("inf"), recomputes=recomputes)
    for partition in partitions:
        assert reach.bound_s <= partition.objective_s * (1 + 1e-9)


@given(searches(), st.booleans(), st.floats(1.0, 1.2) | st.just(float("inf")))
def test_all_columns_of_partitions_below_a_limit_are_found(known, recomputes, share):
    search, partitions = known
    assume(partitions)
    limit_s = min(each.objective_s for each in partitions) * share
    reach = Reach(search, limit_s, recomputes=recomputes)
    reach.narrow(limit_s)
    stages = columns_below(search, limit_s)
    for partition in partitions:
        if partition.objective_s > limit_s:
            continue
        passing_s = detour_s = 0.0
        for stage, column in enumerate(partition.columns):
            assert column in stages[stage]
            ends = reach.ends(
                stage, column.first, passing_s=passing_s, detour_s=detour_s,
                limit_s=limit_s - search.once_s,
            )  # fmt: skip
            assert column.end in ends
            rest_s = reach.rest_s(stage + 1, column.end)
            longest_s = reach.detours[stage].longest_s(column.forward_s, column.backward_s, rest_s)
            passing_s, detour_s = passing_s + column.microbatch_s, max(detour_s, longest_s)


@given(searches(), st.booleans(), st.floats(0.9, 1.2))
def test_no_partition_within_a_limit_is_faster_than_its_bound(known, recomputes, share):
    search, partitions = known
    assume(partitions)
    limit_s = min(each.objective_s for each in partitions) * share
    reach = Reach(search, float("inf"), recomputes=recomputes)
    any_s = reach.bound_s
    reach.narrow(limit_s)
    assert reach.bound_s >= any_s
    for partition in partitions:
        if partition.objective_s <= limit_s:
            assert reach.bound_s <= partition.objective_s * (1 + 1e-9)


@given(searches())
def test_no_column_recomputes_less(known):
    search, _ = known
    places = np.arange(search.num_units + 1)
    starts, ends = places[:, None], places[:, None] + places[1:]
    recomputed = RunRecomputation(search, starts, ends)
    for stage in range(search.configuration.num_stages):
        seconds = recomputed.seconds(stage)
        for first, end in combinations(places.tolist(), 2):
            column = search.column(stage, first, end)
            if column is not None:
                assert seconds[first, end - first - 1] <= column.mix.recompute_s * (1 + 1e-9)
