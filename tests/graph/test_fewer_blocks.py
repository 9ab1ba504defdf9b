"""How a deep model grows, told by one with fewer of its blocks."""

from itertools import chain
from unittest import mock

import pytest
import torch
from graph_models import Stream, token_loss, tokens, wrap
from torch import nn

from planner.graph.division.units import find_layout
from planner.graph.sizes import family as family_module
from planner.graph.sizes.affine import AffineSteps, NotAffineError
from planner.graph.sizes.family import trace_family
from planner.graph.trace import record_step, trace_model
from planner.graph.trial import TriedLayout
from planner.runtime.dry_run import DryRun
from planner.runtime.layout import SplitAxis

DEPTH = 12
WHOLE_STREAM = TriedLayout(over=SplitAxis("tp", 2), sequence_dim=None, modules=())


class Plain(nn.Module):
    """A layer and a residual."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return x + torch.tanh(self.layer(x))


class Wide(Plain):
    """Does more than the others."""

    def forward(self, x):
        return torch.tanh(super().forward(x))


class OneApart(Plain):
    """Of a batch of one another program."""

    def forward(self, x):
        return super().forward(torch.relu(x) if x.shape[0] == 1 else x)


class FirstTwo(Plain):
    """Adds the first samples."""

    def forward(self, x):
        return super().forward(x) + x[:2].sum(0)


class All(Plain):
    """Adds all samples: of a batch of two the same."""

    def forward(self, x):
        return super().forward(x) + x[: x.shape[0]].sum(0)


class Deep(Stream):
    """Blocks of several kinds."""

    def __init__(self, kinds):
        super().__init__(blocks=0)
        self.blocks = nn.ModuleList(kind() for kind in kinds)


class Halves(Deep):
    """Two lists, the second of which reads what comes of the first."""

    def __init__(self, kinds):
        super().__init__(kinds)
        self.more = nn.ModuleList(Wide() for _ in kinds)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        memory = x
        for block in self.more:
            x = block(x + memory)
        return self.head(x)


class Mean(Deep):
    """A number in each block tells how many there are."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x) / len(self.blocks)
        return self.head(x)


class Gathered(Deep):
    """Its end reads what comes of each block."""

    def forward(self, tokens):
        x, seen = self.embed(tokens), []
        for block in self.blocks:
            x = block(x)
            seen.append(x)
        return self.head(torch.stack(seen).sum(0))


class Folded(Deep):
    """Blocks of the second half read what those of the first made."""

    def forward(self, tokens):
        x, made = self.embed(tokens), []
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index < DEPTH // 2:
                made.append(x)
            else:
                x = x + made.pop()
        return self.head(x)


PLAIN = [Plain] * DEPTH
SHORT = {
    "alike": (lambda: Deep(PLAIN), 1, DEPTH, 2),
    "other_ends": (lambda: Deep([Wide, *PLAIN, Wide]), 1, DEPTH + 2, 3),
    "in_turn": (lambda: Deep([Plain, Plain, Wide] * 4), 1, DEPTH, 4),
    "two_lists": (lambda: Halves(PLAIN), 1, 2 * DEPTH, 7),
    "one_apart": (lambda: Deep([OneApart] * DEPTH), 2, DEPTH, 2),
}
"""Models with the smallest size of which the rest follows, their blocks, and those that tell."""

WHOLE = {
    "few": lambda: Deep(PLAIN[:3]),
    "mean": lambda: Mean(PLAIN),
    "folded": lambda: Folded(PLAIN),
    "gathered": lambda: Gathered(PLAIN),
    "alike_of_two": lambda: Deep([FirstTwo, All] * (DEPTH // 2)),
}


def loaded(build):
    return wrap(build, tokens, token_loss)


def steps_traced(model):
    """Trace a family, and return with it the blocks and the size of each step."""
    traced = []

    def watched(*args, **options):
        recording = record_step(*args, **options)
        blocks = sum(unit.block is not None for unit in find_layout(recording).units)
        traced.append((blocks, recording.microbatch_size))
        return recording

    with mock.patch.object(family_module, "record_step", watched):
        family = trace_family(model, dtype="float32")
    return family, traced


def check(family, model):
    for size in (1, 2, 3, 5):
        assert family.at(size) == trace_model(model, microbatch_size=size, dtype="float32"), size


@pytest.mark.parametrize("name", SHORT)
def test_a_deep_model_is_traced_once(name):
    build, smallest, blocks, kept = SHORT[name]
    model = loaded(build)
    family, traced = steps_traced(model)
    of_whole, of_short = ([2], [1, 2, 3]) if smallest == 1 else ([1, 2], [1, 2, 3, 4])
    sizes = [(blocks, size) for size in of_whole], [(kept, size) for size in of_short]
    assert sorted(traced) == sorted(chain(*sizes))
    assert not family.evaluates(smallest - 1)
    check(family, model)


@pytest.mark.parametrize("name", WHOLE)
def test_what_no_short_model_tells_is_traced_whole(name):
    model = loaded(WHOLE[name])
    family, traced = steps_traced(model)
    most = max(blocks for blocks, _ in traced)
    assert {(most, 2), (most, 3), (most, 1)} <= {*traced}
    check(family, model)


def test_a_tensor_grows_alike_for_all_that_read_it():
    low, high = (
        record_step(loaded(lambda: Deep(PLAIN)), microbatch_size=size, dtype="float32")
        for size in (2, 3)
    )
    steps, ops = AffineSteps(low, high), range(len(low.ops))

    def grows(op):
        return any(low.values[each].shape != high.values[each].shape for each in made(low, op))

    twins = {op: op for op in ops}
    assert steps.of_whole(low, twins).at(3) == high
    growing = next(op for op in ops if grows(op))
    still = next(op for op in ops if not grows(op) and alike_wired(low, op, growing))
    with pytest.raises(NotAffineError):
        steps.of_whole(low, {**twins, growing: still})


def made(recording, op):
    return recording.ops[op].outputs


def alike_wired(recording, *ops):
    """Whether ops read and make as many tensors."""
    return len({(len(recording.ops[op].inputs), len(made(recording, op))) for op in ops}) == 1


class MeanOfOne(Mean):
    """Of a batch of one a number in each block tells how many there are."""

    def forward(self, tokens):
        return super().forward(tokens) if len(tokens) == 1 else Deep.forward(self, tokens)


def test_blocks_that_differ_in_a_batch_of_one_are_tried_among_all():
    family = trace_family(loaded(lambda: MeanOfOne(PLAIN)), dtype="float32")
    assert family.evaluates(2)
    assert not family.evaluates(1)
    assert [len(family.trial(size)._graph.units) for size in (1, 2)] == [DEPTH + 2, 4]


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("name", SHORT)
def test_layouts_of_all_blocks_are_tried_on_those_that_are_left(name, size):
    build, _, _, kept = SHORT[name]
    family = trace_family(loaded(build), dtype="float32")
    graph = family.at(size)
    blocks = {unit.structure: unit for unit in graph.units if unit.block is not None}
    tried = []
    run = DryRun.block

    def noted(dry_run, position, *args, **options):
        tried.append(dry_run.anatomy.blocks[position])
        assert len(dry_run.anatomy.blocks) == kept
        return run(dry_run, position, *args, **options)

    with mock.patch.object(DryRun, "block", noted):
        trial = family.trial(family.size_of_trial(size))
        assert not any(trial.block(unit, [WHOLE_STREAM]) for unit in blocks.values())
    assert len(tried) == len({*tried}) == len(blocks)
