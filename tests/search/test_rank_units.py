"""Numbers of units that a rank may hold: none is left out that some choice fits and is in time."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from searches import space_for

from planner.hardware.profiles import load_cluster
from planner.search.column_maker import ColumnMaker, KnownMixes
from planner.search.column_tables import ColumnTable, numbers_of
from planner.search.combination import best_combination
from planner.search.holdings import _Listing, _listings
from planner.search.rank_units import StageChoices, possible_units


@st.composite
def ranks(draw):
    """Two to four stages, each with some columns; two paths, three moments."""
    return [
        [
            (
                draw(st.integers(1, 4)),
                [draw(st.floats(0.0, 5.0)) for _ in range(2)],
                [draw(st.floats(0.0, 8e10)) for _ in range(3)],
            )
            for _ in range(draw(st.integers(1, 5)))
        ]
        for _ in range(draw(st.integers(2, 4)))
    ]


@settings(max_examples=300, deadline=None)
@given(ranks(), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_no_number_is_left_out_that_can_be_held(rank, time_share, room_share):
    stages = [
        StageChoices(
            lengths=np.array([length for length, _, _ in columns]),
            seconds=np.array([seconds for _, seconds, _ in columns]),
            sizes=np.array([sizes for _, _, sizes in columns]),
        )
        for columns in rank
    ]
    totals = [
        (
            sum(length for length, _, _ in choice),
            np.sum([seconds for _, seconds, _ in choice], axis=0),
            np.sum([sizes for _, _, sizes in choice], axis=0),
        )
        for choice in product(*rank)
    ]
    # Limits that some choices just meet.
    most_s = np.quantile([seconds for _, seconds, _ in totals], time_share, axis=0)
    room_bytes = np.quantile([sizes for _, _, sizes in totals], room_share, axis=0)
    found = set(possible_units(stages, most_s=most_s * (1 + 1e-9), room_bytes=room_bytes))
    held = {
        units
        for units, seconds, sizes in totals
        if (seconds <= most_s).all() and (sizes <= room_bytes).all()
    }
    assert held <= found


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
            if not all(stages) or _listings(search, stages, limit_s) is not None:
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
            numbers = numbers_of([(moment,) for moment in moments])[:, 0]
            held = [[column.held_bytes(at) for at in moments] for column in columns]
            transient = [[column.mix.transient_bytes(at) for at in moments] for column in columns]
            assert table.held_bytes(numbers) == pytest.approx(np.array(held), rel=1e-12)
            assert table.transient_bytes(numbers).tolist() == transient


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
