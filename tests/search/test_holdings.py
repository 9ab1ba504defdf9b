"""Choices of a rank that no other makes needless."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from planner.search.holdings import _undominated

LENGTHS = (
    st.integers(0, 40)
    .map(lambda rows: (rows, 2))
    .flatmap(lambda shape: arrays(np.int64, shape, elements=st.integers(1, 2)))
)


@given(LENGTHS, st.data())
def test_of_the_same_lengths_none_is_beaten_and_what_is_left_out_is(lengths, data):
    shape = len(lengths), 4
    seconds = data.draw(arrays(float, shape, elements=st.sampled_from([1.0, 2.0, 3.0])))
    kept = _undominated(lengths, seconds).tolist()
    assert len({*kept}) == len(kept)

    def beats(one, other):
        alike = (lengths[one] == lengths[other]).all()
        return alike and (seconds[one] <= seconds[other]).all()

    assert not any(beats(one, other) for one in kept for other in kept if one != other)
    for at in {*range(len(lengths))} - {*kept}:
        assert any(beats(one, at) for one in kept)
