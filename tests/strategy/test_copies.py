"""Copies that are priced beside collectives are those that the runtime makes."""

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from planner.runtime.layout import REPLICATE, shard
from planner.runtime.split_tensor import Ranks
from planner.strategy.conversion import copied_bytes, operand_bytes

RANKS = 2
ITEMSIZE = 4


class Copies(TorchDispatchMode):
    """Notes the bytes of tensors that ops copy."""

    def __init__(self):
        super().__init__()
        self.bytes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("clone", "copy", "copy_", "cat", "_to_copy"):
            self.bytes.append(result.numel() * result.element_size())
        return result


@st.composite
def changes(draw):
    """A shape, a dim that is split with parts of it side by side, and another such dim."""
    dims = draw(st.permutations(range(3)))
    sizes = [draw(st.integers(1, 3)) for _ in range(3)]
    first, second = (shard(dim, draw(st.sampled_from([1, 1, 2]))) for dim in dims[:2])
    for each in (first, second):
        sizes[each.dim] = 2 * RANKS * each.outer
    return tuple(sizes), first, second


@given(changes())
def test_copies_are_those_of_the_runtime(change):
    shape, first, second = change
    ranks = Ranks(rank=0, size=RANKS, group=None)
    whole = torch.zeros(shape)
    part = ranks.part(whole, first).clone(memory_format=torch.contiguous_format)
    cases = {
        "all_reduce": (lambda: ranks.reduced(whole), ()),
        "all_gather": (lambda: ranks.gathered(part, first), (first, REPLICATE)),
        "reduce_scatter": (lambda: ranks.scattered(whole, second), (REPLICATE, second)),
    }
    if first.outer == second.outer == 1:
        exchange = (lambda: ranks.exchanged(part, first, second)), (first, second)
        cases["all_to_all"] = exchange
    for kind, (run, layouts) in cases.items():
        with Copies() as made:
            run()
        moved_bytes = operand_bytes(kind, prod(shape) * ITEMSIZE, RANKS)
        expected = copied_bytes(kind, shape, layouts, moved_bytes)
        assert sorted(made.bytes) == sorted(expected), (kind, shape, layouts)
