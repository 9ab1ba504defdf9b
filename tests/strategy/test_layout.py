"""Shards followed through views are the shards that the view of a real tensor has."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from planner.runtime.layout import (
    REPLICATE,
    Layout,
    can_shard,
    shard,
    through_reshape,
    through_segments,
)


def local(tensor: torch.Tensor, layout: Layout, rank: int, tp: int) -> torch.Tensor:
    """The part of a tensor that a rank holds."""
    parts = tensor.shape[layout.dim] // layout.outer
    pieces = tensor.unflatten(layout.dim, (layout.outer, parts)).chunk(tp, layout.dim + 1)
    return pieces[rank].flatten(layout.dim, layout.dim + 1)


@st.composite
def reshapes(draw):
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=2, max_size=5))

    def grouped():
        cuts = sorted(draw(st.sets(st.integers(1, len(factors) - 1))))
        edges = [0, *cuts, len(factors)]
        sizes = []
        for start, end in pairwise(edges):
            size = 1
            for factor in factors[start:end]:
                size *= factor
            sizes.append(size)
        return tuple(sizes)

    return grouped(), grouped()


@given(reshapes(), st.data())
def test_a_reshaped_shard_is_the_shard_of_the_reshaped_tensor(shapes, data):
    source, target = shapes
    tp = 2
    options = [
        shard(dim, outer)
        for dim, size in enumerate(source)
        for outer in range(1, size + 1)
        if can_shard(source, shard(dim, outer), tp) and size % outer == 0
    ]
    if not options:
        return
    layout = data.draw(st.sampled_from(options))
    found = through_reshape(layout, source, target, tp)
    if found is None:
        return
    tensor = torch.arange(torch.Size(source).numel()).view(source)
    for rank in range(tp):
        before = local(tensor, layout, rank, tp).reshape(-1)
        after = local(tensor.view(target), found, rank, tp).reshape(-1)
        assert torch.equal(before, after)


def test_heads_split_off_and_merge_again():
    split = through_reshape(shard(2), (2, 8, 64), (2, 8, 4, 16), 2)
    assert split == shard(2)
    assert through_reshape(shard(2), (2, 8, 4, 16), (2, 8, 64), 2) == shard(2)


def test_more_ranks_than_heads_cannot_be_followed():
    assert through_reshape(shard(2), (2, 8, 64), (2, 8, 2, 32), 4) is None


def test_fused_projections_come_apart_into_their_own_shards():
    fused = shard(2, 3)
    assert through_segments(fused, 2, 192, 64) == shard(2)
    assert through_reshape(fused, (2, 8, 192), (2, 8, 3, 4, 16), 2) == shard(3)
    assert through_segments(shard(2), 2, 192, 64) is None


def test_flattening_batch_and_sequence_keeps_the_sequence_shard():
    flat = through_reshape(shard(1), (2, 8, 64), (16, 64), 4)
    assert flat == shard(0, 2)
    assert through_reshape(flat, (16, 64), (2, 8, 64), 4) == shard(1)


def test_whole_tensors_stay_whole():
    assert through_reshape(REPLICATE, (2, 3), (6,), 2) == REPLICATE
