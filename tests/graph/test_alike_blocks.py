"""Blocks that one of their kind tells of look as if they had run."""

from functools import partial

import pytest
import torch
from graph_models import mean_square, vectors, wrap
from torch import nn

from planner.graph import trial as trial_module
from planner.graph.alike_blocks import alike_blocks_skipped, kinds_of_blocks
from planner.graph.operator_graph import UnitKind
from planner.graph.trace import trace_model
from planner.graph.trial import LayoutTrial
from planner.runtime.anatomy import examine

TOKENS = 6


class Block(nn.Module):
    """Hands a table on beside its stream, in some models in other ways than others."""

    def __init__(self, runs, way="plain"):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.runs, self.way = runs, way

    def forward(self, x, table, *, scale=None):
        self.runs.append(self)
        y = self.linear(x) * table
        if self.way == "in place":
            x.detach().mul_(2)
        if self.way == "two":
            return y, table * 2
        return (y, 3) if self.way == "number" else (y, table, None)


class Model(nn.Module):
    def __init__(self, way="plain"):
        super().__init__()
        self.runs = []
        self.blocks = nn.ModuleList(Block(self.runs, way) for _ in range(5))

    def forward(self, x):
        table = torch.ones(4, device=x.device)
        for block in self.blocks:
            x, *_ = block(x, table)
        return x


def looked_at(model, kinds):
    """What a look tells, with the number of blocks that ran."""
    paths = [f"blocks.{position}" for position in range(5)]
    around = partial(alike_blocks_skipped, paths, kinds)
    anatomy = examine(model, paths, torch.randn(2, TOKENS, 4), torch.float32, (), around)
    twin_runs = anatomy.twin.runs
    return anatomy, len(twin_runs)


def looks(anatomy):
    """All that stand-ins are made of, with one number for each sketch."""
    numbers = {}

    def look(leaf):
        if leaf is None or isinstance(leaf, int):
            return leaf
        number = numbers.setdefault(id(leaf), len(numbers))
        return number, leaf.shape, leaf.dtype, leaf.requires_grad, leaf.is_changed

    return {
        path: [
            ([look(leaf) for leaf in call.output], [look(leaf) for leaf in call.arguments])
            for call in calls
        ]
        for path, calls in anatomy.calls.items()
    }


def test_blocks_of_a_kind_are_told_by_the_first():
    every, ran = looked_at(Model(), [None] * 5)
    assert ran == 5
    some, ran = looked_at(Model(), ["A", "A", "A", "B", "B"])
    assert ran == 3  # no gradient flows into the first, so that it tells nothing of the others
    assert looks(some) == looks(every)
    assert [stream.shape for stream in some.streams] == [stream.shape for stream in every.streams]
    assert "forward" not in vars(some.twin.blocks[1])


@pytest.mark.parametrize("way", ["in place", "two", "number"])
def test_blocks_run_where_the_first_tells_too_little(way):
    every, _ = looked_at(Model(way), [None] * 5)
    some, ran = looked_at(Model(way), ["A"] * 5)
    assert ran == 5
    assert looks(some) == looks(every)


def test_a_block_runs_whose_modules_have_hooks():
    model, seen = Model(), []
    model.blocks[3].linear.register_forward_hook(lambda *_: seen.append(3))
    _, ran = looked_at(model, ["A"] * 5)
    assert ran == 3
    assert seen == [3]


def test_a_block_runs_that_gets_other_sizes():
    model = Model()
    model.blocks[2].register_forward_pre_hook(lambda _, args: (args[0][:, 1:], args[1]))
    some, ran = looked_at(model, [None, "A", "A", "A", "A"])
    assert ran == 3
    assert some.streams[-1].shape == (2, TOKENS - 1, 4)


class Leaving(nn.Module):
    """A block that may leave a part of its own in a list."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, left):
        y = self.linear(x)
        if left is not None:
            left.append(y.exp())
        return y.tanh()


class Collecting(nn.Module):
    """Adds what its blocks leave."""

    def __init__(self, *, leaves):
        super().__init__()
        self.blocks = nn.ModuleList(Leaving() for _ in range(4))
        self.leaves = leaves

    def forward(self, x):
        left = [] if self.leaves else None
        for block in self.blocks:
            x = block(x, left)
        return x + sum(left or ())


def trial_of(*, leaves):
    model = wrap(lambda: Collecting(leaves=leaves), vectors(4), mean_square)
    graph = trace_model(model, microbatch_size=2, dtype="float32")
    assert sum(unit.kind is UnitKind.BLOCK for unit in graph.units) == 4
    return graph, LayoutTrial(model, graph, "float32")


@pytest.mark.parametrize("leaves", [False, True])
def test_blocks_are_alike_of_which_others_read_one_tensor(leaves):
    graph, _ = trial_of(leaves=leaves)
    assert [kind is None for kind in kinds_of_blocks(graph)] == [leaves] * 4


def test_a_look_that_fails_where_blocks_are_left_out_runs_them(monkeypatch):
    _, trial = trial_of(leaves=False)
    looks = []

    def refuse(*arguments):
        looks.append(arguments[1])
        raise RuntimeError("not like this")

    monkeypatch.setattr(trial_module, "alike_blocks_skipped", refuse)
    found = trial.loss("blocks.3")
    assert [None in kinds for kinds in looks] == [False, True]
    assert "not like this" in found.reason
