"""Stretches of a model in which runs of one length stand for one another."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from planner.cost.model_units import ModelUnits, TiedWeight
from planner.graph.analysis.shared import SharedActivation

PROLOGUE, BLOCK, OTHER, EPILOGUE = (object() for _ in range(4))


def units_of(number, shared, *, tied=(), other=()):
    """Alike blocks but for some, between a prologue and an epilogue."""
    blocks = [OTHER if at in other else BLOCK for at in range(1, number - 1)]
    return ModelUnits(
        units=(PROLOGUE, *blocks, EPILOGUE),
        entering_bytes=(0, *[8] * (number - 1)),
        received_bytes=((0, 0, 0),) * number,
        tied=tied,
        shared=tuple(shared),
    )


def shared_by(units, *, size=4, owners=(0,), received=()):
    return SharedActivation(
        storage=0, size_bytes=size,
        units=frozenset(units), owners=frozenset(owners), received=frozenset(received),
    )  # fmt: skip


def kept_bytes(model, first, end, *, has_buffers):
    """``StageMemory.shared_bytes``, what a stage sends apart."""
    return sum(
        each.size_bytes
        for each in model.shared
        if each.counts(first, end) and not (has_buffers and first in each.received)
    )


def test_masks_that_alternate_tell_no_runs_apart():
    """Each is kept by every second block: the one or the other by a block alone, both by a run."""
    blocks = range(1, 9)
    masks = [shared_by(blocks[0::2]), shared_by(blocks[1::2])]
    assert units_of(10, masks).stretches == (0, *[1] * 8, 9)


def test_masks_of_other_sizes_do():
    blocks = range(1, 9)
    masks = [shared_by(blocks[0::2]), shared_by(blocks[1::2], size=5)]
    assert units_of(10, masks).stretches == tuple(range(10))


def test_a_tied_weight_and_another_block_do():
    tied = TiedWeight(units=(0, 3), trained_bytes=4, gathered_bytes=2)
    assert units_of(6, []).stretches == (0, 1, 1, 1, 1, 5)
    assert units_of(6, [], tied=(tied,)).stretches == (0, 1, 1, 3, 4, 5)
    assert units_of(6, [], other={3}).stretches == (0, 1, 1, 3, 4, 5)


UNITS = st.sets(st.integers(1, 8))


@given(
    st.lists(st.tuples(UNITS, st.sets(st.integers(0, 9)), UNITS, st.integers(1, 3)), max_size=3),
    st.sets(st.integers(1, 8), max_size=2),
)
def test_runs_of_a_stretch_keep_the_same(drawn, other):
    shared = [
        shared_by(units, owners=owners, received=received, size=size)
        for units, owners, received, size in drawn
    ]
    model = units_of(10, shared, other=other)
    for first, other_first in combinations(range(10), 2):
        if model.stretches[first] != model.stretches[other_first]:
            continue
        for length in range(1, 11 - other_first):
            if model.stretches[other_first + length - 1] != model.stretches[first]:
                break
            for has_buffers in (False, True):
                one, another = (
                    kept_bytes(model, at, at + length, has_buffers=has_buffers)
                    for at in (first, other_first)
                )
                assert one == another
