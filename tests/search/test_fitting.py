"""Whether a cut fits, and which runs stand for others, against all cuts and runs."""

from dataclasses import astuple, replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instances import (
    MIB,
    all_kinds,
    clusters,
    configurations,
    heavier,
    model_units,
    models,
    search_of,
    units,
)

from planner.cost.held_stage import HeldStage
from planner.graph.analysis.shared import SharedActivation
from planner.search.fitting import fits_somehow


@st.composite
def stretched_models(draw):
    """Two kinds of blocks, each in a row; some cuts send more, some units keep something."""
    kinds = [draw(units(f"block{at}", has_kinds=True, master=2)) for at in range(2)]
    numbers = draw(st.integers(1, 2)), draw(st.integers(2, 4))
    blocks = [kind for kind, number in zip(kinds, numbers, strict=True) for _ in range(number)]
    ends = [draw(units(name, has_kinds=False, master=2)) for name in ("prologue", "epilogue")]
    count = len(blocks) + 2
    entering = [0] + [16 * MIB] * (count - 1)
    if draw(st.booleans()):
        entering[draw(st.integers(1, count - 1))] = 48 * MIB
    shared = ()
    if draw(st.booleans()):
        readers = frozenset(range(draw(st.integers(1, count - 2)), count - 1))
        shared = (
            SharedActivation(
                storage=0, size_bytes=90 * MIB, units=readers, owners=frozenset({min(readers) - 1})
            ),
        )
    return model_units(tuple([ends[0], *blocks, ends[1]]), tuple(entering), (), shared)


def alone(model, cluster):
    """Configurations with one stage per rank that the model has units for."""
    return [
        search_of(model, each, cluster)
        for each in configurations(model)
        if each.virtual_stages == 1 and each.degrees.pp <= len(model.units)
    ]


@given(stretched_models(), clusters())
def test_alike_runs_take_and_hold_the_same(model, cluster):
    for search in alone(model, cluster):
        for run in combinations(range(search.num_units + 1), 2):
            like = search.representative(*run)
            assert like[1] - like[0] == run[1] - run[0]
            seconds, others = (search.table.seconds_with(*each, 0.0) for each in (run, like))
            assert astuple(seconds) == pytest.approx(astuple(others), rel=1e-9, abs=1e-12)
            assert held(search, run) == pytest.approx(held(search, like))


def held(search, run):
    memory, blocks = search.table.memory, search.table.units[slice(*run)]
    kept = [sum(unit.activation_bytes[kind] for unit in blocks) for kind in search.maker.kinds]
    return [
        *(memory.static_bytes(*run), memory.gradient_bytes(*run), memory.reduction_bytes(*run)),
        *(memory.gathered.late_bytes(*run), memory.beside_bytes(*run), *kept),
    ]


@given(stretched_models(), clusters())
def test_blocks_of_one_kind_stand_for_one_another(model, cluster):
    """Nothing sent or kept tells them apart, so that runs of the second kind are looked at once."""
    alike = (0, *[MIB] * (len(model.units) - 1))
    received = tuple((each,) * 3 for each in alike)
    plain = replace(model, shared=(), entering_bytes=alike, received_bytes=received)
    search = alone(plain, cluster)[0]
    last = plain.blocks.stop
    first = next(at for at in plain.blocks if plain.units[at] is plain.units[last - 1])
    assert search.representative(last - 1, last) == (first, first + 1)


@settings(max_examples=300)
@given(st.one_of(models(), stretched_models()), clusters(), st.data())
def test_no_run_inside_one_that_fits_exceeds_memory(model, cluster, data):
    """Wherever it ends, and wherever it begins; a device that the run fills to the byte."""
    model = heavier(model, data.draw(st.sampled_from([1, 8])))
    searches = alone(model, cluster)
    pp = data.draw(st.sampled_from(sorted({each.configuration.degrees.pp for each in searches})))
    search = data.draw(st.sampled_from([e for e in searches if e.configuration.degrees.pp == pp]))
    configuration, memory, count = search.configuration, search.table.memory, search.num_units
    stage = data.draw(st.integers(0, pp - 1))
    runs = [(0, count)] if pp == 1 else list(combinations(range(count + 1), 2))
    first, end = data.draw(st.sampled_from(runs))
    *others, leanest = all_kinds(configuration, first, end, count - 1)
    kinds = data.draw(st.just(leanest) | st.sampled_from([leanest, *others]))
    filled_bytes = max(
        memory.peak([HeldStage(first=first, end=end, kinds=kinds, moment=at)]).total_bytes
        for (at,) in configuration.fullest_moments(stage)
    )
    host = replace(cluster.host, memory_bytes=2**50)
    device = replace(cluster.device, memory_bytes=filled_bytes)
    search = search_of(model, configuration, replace(cluster, device=device, host=host))
    for inner_end in range(first + 1, end + 1):
        assert not search.exceeds_memory(stage, first, inner_end)
    assert search.last_held(stage, first) >= end
    for start in range(first, end):
        assert search.furthest_end(stage, start, near=0) >= end


@given(stretched_models(), clusters(), st.floats(0.0, 1.2))
def test_some_cut_fits_where_enumeration_finds_one(model, cluster, share):
    for search in alone(model, cluster):
        stages = search.configuration.num_stages
        sizes = [search.maker.leanest(0, search.num_units).kept_bytes]
        sizes.append(search.table.memory.static_bytes(0, search.num_units))
        search.room_bytes = share * sum(sizes)
        some = any(
            all(mix_of(search, stage, run) for stage, run in enumerate(pairwise(cuts)))
            for inner in combinations(range(1, search.num_units), stages - 1)
            for cuts in [(0, *inner, search.num_units)]
        )
        assert fits_somehow(search) == some


@given(st.one_of(models(), stretched_models()), clusters(), st.floats(0.0, 1.2))
def test_runs_inside_a_stretch_fit_where_longer_ones_do(model, cluster, share):
    for search in alone(model, cluster):
        search.room_bytes = share * search.table.memory.static_bytes(0, search.num_units)
        for stage in range(search.configuration.num_stages):
            for start, last in search.stretch_ends.items():
                runs = [(start, end) for end in range(start + 1, last + 1)]
                fits = [search.fits_alone(stage, *run) for run in runs]
                assert fits == sorted(fits, reverse=True)
                assert fits == [mix_of(search, stage, run) is not None for run in runs]


def mix_of(search, stage, run):
    moments = search.configuration.fullest_moments(stage)
    return search.maker.cheapest(*run, moments=moments, capacity_bytes=search.room_bytes)
