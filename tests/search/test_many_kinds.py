"""Recomputations of runs whose choices are not enumerated, against fronts of all."""

from itertools import combinations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from instances import clusters, configurations, models, search_of

from planner.search import many_kinds


@given(st.data(), models(), clusters())
def test_a_recomputation_is_as_fast_as_that_of_fronts(data, model, cluster):
    piped = [each for each in configurations(model) if each.virtual_stages == 1]
    assume(piped)
    configuration = data.draw(st.sampled_from(piped))
    search, other = (search_of(model, configuration, cluster) for _ in range(2))
    for stage in range(configuration.num_stages):
        for first, end in combinations(range(search.num_units + 1), 2):
            exact = search.column(stage, first, end)
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(many_kinds, "_MOST_STRUCTURES", 0)
                found = other.column(stage, first, end)
            if exact is None:
                assert found is None
                continue
            run_s = search.least_s(first, end)
            assert other.fits(stage, [found])
            assert found.mix.recompute_s >= exact.mix.recompute_s * (1 - 1e-9)
            assert found.mix.recompute_s <= exact.mix.recompute_s + 2e-6 * run_s
    assert other.maker.share_off <= 2e-6
