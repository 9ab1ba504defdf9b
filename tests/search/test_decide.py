"""The search against enumeration of its whole stated space, by the action list."""

from dataclasses import replace
from itertools import combinations, pairwise
from math import ceil

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from instances import (
    RANKS_PER_CORE,
    all_kinds,
    check,
    clusters,
    configurations,
    enumerated_s,
    heavier,
    models,
    search_of,
)

from planner.cost.held_stage import HeldStage
from planner.search import column_maker, many_kinds, stage_problem
from planner.search.column_maker import ColumnMaker
from planner.search.columns import KnownMixes
from planner.search.decide import Decision
from planner.strategy.moments import StageMoment
from planner.vocabulary import RECOMPUTATIONS


def check_all(model, cluster):
    check([search_of(model, c, cluster) for c in configurations(model)])


@settings(max_examples=300)
@given(models(), clusters(), RANKS_PER_CORE, st.data())
def test_the_search_equals_enumeration(model, cluster, ranks_per_core, data):
    """A few configurations against each other; the benchmark has all of them."""
    known = list(configurations(model, ranks_per_core))
    places = data.draw(st.sets(st.integers(0, len(known) - 1), min_size=2, max_size=5))
    check([search_of(model, known[place], cluster) for place in sorted(places)])


@settings(max_examples=200)
@given(models(), clusters(), RANKS_PER_CORE, st.data())
def test_so_it_does_where_choices_are_not_listed(model, cluster, ranks_per_core, data):
    """As for stages of many kinds of blocks."""
    known = [c for c in configurations(model, ranks_per_core) if c.virtual_stages == 1]
    configuration = data.draw(st.sampled_from(known))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(many_kinds, "_MOST_STRUCTURES", 0)
        patched.setattr(column_maker, "_TOLERANCE", 0.0)
        check([search_of(model, configuration, cluster)])


@settings(max_examples=20)
@given(models(), clusters(), st.data())
def test_recomputations_that_may_be_slower_are_not_called_optimal(model, cluster, data):
    configuration = data.draw(st.sampled_from(list(configurations(model))))
    search = search_of(model, configuration, cluster)
    search.maker.share_off = 0.01
    decision = Decision([search], top=1, time_limit_s=None)
    report = decision.decide()
    assume(decision.incumbents.solved)
    assert report.status == "work limit"
    assert report.bound_s <= 0.99 * report.objective_s * (1 + 1e-9)


def peak_of_some_rank(configuration, model, cluster, choose):
    """What a rank holds under some cut and some recomputations."""
    costs = search_of(model, configuration, cluster).table
    count, rank = len(costs.units), choose(range(configuration.degrees.pp))
    cuts = choose(list(combinations(range(1, count), configuration.num_stages - 1)))
    runs = [list(pairwise((0, *cuts, count)))[s] for s in configuration.stages_of(rank)]
    kinds = [choose(list(all_kinds(configuration, *run, count - 1))) for run in runs]
    return max(
        costs.memory.peak(
            [
                HeldStage(first=a, end=b, kinds=each, moment=at)
                for (a, b), each, at in zip(runs, kinds, moment, strict=True)
            ]
        ).total_bytes
        for moment in configuration.fullest_moments(rank)
    )


@settings(max_examples=500)
@given(models(), clusters(), st.data())
def test_a_device_that_just_holds_a_stage_is_filled(model, cluster, data):
    """Where the search takes a stage for larger than it is, it finds less."""

    def choose(among):
        return data.draw(st.sampled_from(among))

    model = heavier(model, choose([1, 8]))
    known = list(configurations(model))
    pp = choose(sorted({each.degrees.pp for each in known}))
    configuration = choose([each for each in known if each.degrees.pp == pp])
    memory_bytes = peak_of_some_rank(configuration, model, cluster, choose)
    device = replace(cluster.device, memory_bytes=memory_bytes)
    check([search_of(model, configuration, replace(cluster, device=device))])


@pytest.mark.bench
@settings(max_examples=5000)
@given(models(), clusters(), st.sampled_from([1, 1, 8]))
def test_the_search_equals_enumeration_often(model, cluster, by):
    check_all(heavier(model, by), cluster)


@settings(max_examples=60)
@given(models(), clusters(), st.floats(0.0, 1.0))
def test_a_column_costs_what_its_units_cost(model, cluster, share):
    """Also the model's first block, behind whose recomputation less traffic hides."""
    for configuration in configurations(model):
        costs = search_of(model, configuration, cluster).table
        maker = ColumnMaker(costs, kinds=RECOMPUTATIONS, known=KnownMixes())
        for first, end in combinations(range(len(model.units) + 1), 2):
            most, least = (
                costs.memory.static_bytes(first, end) + mix.kept_bytes + mix.temporary_bytes
                for mix in (maker.uniform_mixes(first, end)[0], maker.leanest(first, end))
            )
            room = least + share * max(0.0, most - least)
            alone = StageMoment(in_flight=1)
            mix = maker.cheapest(first, end, moments=[(alone,)], capacity_bytes=room)
            if mix is not None:
                column = maker.column(0, first, end, mix)
                held = HeldStage(first=first, end=end, kinds=mix.kinds, moment=alone)
                peak = costs.memory.peak([held])
                assert peak.tensor_bytes <= room + 1
                beside = peak.reserve_bytes - costs.memory.reserve_bytes
                assert beside == ceil(cluster.device.allocator_share * peak.tensor_bytes)
                seconds = costs.seconds(first, end, mix.kinds, stage=0)
                assert column.backward_s == pytest.approx(seconds.backward_s, rel=1e-9)


@settings(max_examples=60)
@given(models(always_alike=True), clusters())
def test_interleaved_configurations_alone_equal_enumeration(model, cluster):
    """Without a faster configuration beside them, what each rank can hold is listed."""
    for configuration in configurations(model):
        if configuration.virtual_stages > 1 and configuration.num_microbatches < 100:
            search = search_of(model, configuration, cluster)
            best_s = enumerated_s(search)
            decision = Decision([search], top=1, time_limit_s=None)
            report = decision.decide()
            assert report.objective_s == pytest.approx(best_s, rel=1e-6)
            assert bool(decision.incumbents.solved) == (best_s < float("inf"))


@settings(max_examples=60)
@given(models(), clusters())
def test_what_has_too_many_runs_is_left_open(model, cluster):
    for configuration in configurations(model):
        search = search_of(model, configuration, cluster)
        if configuration.virtual_stages > 1 and not search.is_uniform:
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(stage_problem, "_MOST_ENTRIES", 0)
                decision = Decision([search], top=1, time_limit_s=None)
                report = decision.decide()
            best_s = enumerated_s(search)
            assert report.bound_s <= best_s * (1 + 1e-6)
            assert bool(decision.incumbents.solved) == (best_s < float("inf"))
            if report.status == "optimal":
                assert report.objective_s == pytest.approx(best_s, rel=1e-6)


@settings(max_examples=10)
@given(models(), clusters(), st.sampled_from(["memory", "bandwidth"]), st.floats(1.1, 4.0))
def test_more_of_anything_is_never_worse(model, cluster, what, factor):
    def best_s(machine):
        searches = [search_of(model, c, machine) for c in configurations(model)]
        decision = Decision(searches, top=3, time_limit_s=None)
        decision.decide()
        return decision.incumbents.nth_s(1)

    if what == "memory":
        device = replace(cluster.device, memory_bytes=round(cluster.device.memory_bytes * factor))
        better = replace(cluster, device=device)
    else:
        links = tuple(
            replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor)
            for link in cluster.links
        )
        better = replace(cluster, links=links)
    assert best_s(better) <= best_s(cluster) * (1 + 1e-6)
