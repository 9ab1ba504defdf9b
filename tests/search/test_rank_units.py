"""Numbers of units that a rank may hold: none is left out that some choice fits and is in time."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from searches import space_for

from planner.hardware.profiles import load_cluster
from planner.search.column_maker import ColumnMaker
from planner.search.column_tables import ColumnTable
from planner.search.columns import KnownMixes
from planner.search.combination import best_combination
from planner.search.holdings import _Listing
from planner.search.rank_totals import adds_up
from planner.search.rank_units import StageChoices, possible_units


@st.composite
def ranks(draw):
    """One to three ranks of two to four stages, each with some columns; two paths, three moments.

    By stage: lengths of its columns, and by rank what each takes and holds.
    """
    num_ranks = draw(st.integers(1, 3))
    stages = []
    for _ in range(draw(st.integers(2, 4))):
        lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
        shape = num_ranks, len(lengths)
        seconds = draw(arrays(float, (*shape, 2), elements=st.floats(0.0, 5.0)))
        sizes = draw(arrays(float, (*shape, 3), elements=st.floats(0.0, 8e10)))
        stages.append(StageChoices(lengths=np.array(lengths), seconds=seconds, sizes=sizes))
    return stages


@settings(max_examples=300, deadline=None)
@given(ranks(), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_no_number_is_left_out_that_can_be_held(stages, time_share, room_share):
    num_ranks = len(stages[0].seconds)
    totals = [
        (
            sum(int(stage.lengths[at]) for stage, at in zip(stages, choice, strict=True)),
            sum(stage.seconds[:, at] for stage, at in zip(stages, choice, strict=True)),
            sum(stage.sizes[:, at] for stage, at in zip(stages, choice, strict=True)),
        )
        for choice in product(*(range(len(stage.lengths)) for stage in stages))
    ]
    # Limits that some choices just meet.
    most_s = np.quantile([seconds for _, seconds, _ in totals], time_share, axis=0)
    room_bytes = float(np.quantile([sizes.max() for _, _, sizes in totals], room_share))
    found = possible_units(stages, most_s=most_s * (1 + 1e-9), room_bytes=room_bytes)
    for rank in range(num_ranks):
        held = {
            units
            for units, seconds, sizes in totals
            if (seconds[rank] <= most_s[rank]).all() and (sizes[rank] <= room_bytes).all()
        }
        assert held <= {*found.of(rank)}


@pytest.fixture(scope="module")
def searches(big_gpt):
    space = space_for(big_gpt, load_cluster("a100-40gb-sxm", gpus=8))
    legal, _ = space.legal()
    return [search for configuration in legal for search in space.searches(configuration)]


def counted(searches):
    return [each for each in searches if each.shares_ranks and each.is_uniform]


def columns_of(search):
    last = search.configuration.num_stages - 1
    ends = [run for run in ((0, end) for end in search.positions[1:-1])]
    runs = [ends, *[search.near_inner_runs] * (last - 1)]
    runs.append([(first, search.num_units) for first in search.positions[1:-1]])
    return [
        [column for run in of_stage for column in search.columns(stage, *run)]
        for stage, of_stage in enumerate(runs)
    ]


def test_what_cannot_add_up_is_not_listed(searches):
    """Where the ranks' lists exist, and none adds up to the model, or some do."""
    refused = 0
    for search in counted(searches):
        stages = columns_of(search)
        for factor in (1.0, 1.05, 1.2, 1.5):
            limit_s = factor * search.bound_s
            pp = search.configuration.degrees.pp
            if not all(stages) or adds_up(search, stages, limit_s):
                continue
            tables = [ColumnTable(search, columns) for columns in stages]
            listings = [_Listing(search, tables[r::pp], r, limit_s) for r in range(pp)]
            refused += 1
            sums = {0}
            for listing in listings:
                listed = listing.run()
                if listed is None:
                    break
                lengths = {sum(c.end - c.first for c in held) for held in listed}
                sums = {before + length for before in sums for length in lengths}
            else:
                # What ranks list beside each other may add up; then it is slower than the limit.
                assert search.num_units not in sums or _least_s(search, listings) > limit_s
    assert refused


def _least_s(search, listings):
    found = best_combination(search, [listing.run() for listing in listings], float("inf"))
    assert found is not None
    return found.bound_s


def test_tables_hold_what_their_columns_hold(searches):
    for search in counted(searches)[::5]:
        for stage, columns in enumerate(columns_of(search)):
            if not columns:
                continue
            table = ColumnTable(search, columns)
            local = stage // search.configuration.degrees.pp
            rank = stage % search.configuration.degrees.pp
            moments = [moment[local] for moment in search.fullest_moments(rank)]
            numbers = search.configuration.moment_rows(rank)[:, local].astype(float)
            held = [[column.held_bytes(at) for at in moments] for column in columns]
            assert table.held_bytes(numbers) == pytest.approx(np.array(held), rel=1e-12)
            mean = numbers.mean(axis=0, keepdims=True)
            most = np.mean(held, axis=1) * (1 + 1e-12)
            assert (table.held_bytes(mean)[:, 0] <= most).all()


def test_mixes_known_from_other_configurations_are_those_made_anew(searches):
    for search in searches[::7]:
        fresh = ColumnMaker(search.table, kinds=search.maker.kinds, known=KnownMixes())
        for run in ((0, 2), (1, 3), (2, 4), (search.num_units - 2, search.num_units)):
            assert search.maker.uniform_mixes(*run) == fresh.uniform_mixes(*run)
            assert search.maker.leanest(*run) == fresh.leanest(*run)


def test_an_even_cut_is_nearest_to_even_shares(searches):
    for search in searches:
        cuts, stages = search.even_cut(), search.configuration.num_stages
        for stage in range(1, stages):
            low = search.positions.index(cuts[stage - 1]) + 1
            high = len(search.positions) - (stages - stage)
            assert cuts[stage] == min(
                search.positions[low:high],
                key=lambda end: abs(search.least_s(0, end) - stage * search.even_s),
            )
