"""How a deep model grows, told by one with fewer of its blocks."""

from unittest import mock

import pytest
import torch
from graph_models import Stream, token_loss, tokens, wrap
from torch import nn

from planner.graph.division.structure import structure_hashes
from planner.graph.division.units import find_layout
from planner.graph.sizes import family as family_module
from planner.graph.sizes import fewer_blocks
from planner.graph.sizes.affine import AffineSteps, NotAffineError
from planner.graph.sizes.family import trace_family
from planner.graph.trace import record_step, trace_model

DEPTH = 8


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
    "alike": (lambda: Deep(PLAIN), 1, DEPTH - 2),
    "other_ends": (lambda: Deep([Wide, *PLAIN, Wide]), 1, DEPTH - 1),
    "in_turn": (lambda: Deep([Plain, Plain, Wide] * 4), 1, 12 - 4),
    "two_lists": (lambda: Halves(PLAIN), 1, 2 * DEPTH - 7),
    "one_apart": (lambda: Deep([OneApart] * DEPTH), 2, DEPTH - 2),
}
"""Models with the smallest size of which the rest follows, and the blocks that are left out."""

WHOLE = {
    "few": lambda: Deep(PLAIN[:3]),
    "mean": lambda: Mean(PLAIN),
    "folded": lambda: Folded(PLAIN),
    "gathered": lambda: Gathered(PLAIN),
}


def loaded(build):
    return wrap(build, tokens, token_loss)


def steps_traced(model):
    """Trace a family, and return with it the blocks left out and the size of each step."""
    traced = []

    def watched(model, *, microbatch_size, without=(), **options):
        traced.append((len(without), microbatch_size))
        return record_step(model, microbatch_size=microbatch_size, without=without, **options)

    with (
        mock.patch.object(family_module, "record_step", watched),
        mock.patch.object(fewer_blocks, "record_step", watched),
    ):
        family = trace_family(model, dtype="float32")
    return family, traced


def check(family, model):
    for size in (1, 2, 3, 5):
        assert family.at(size) == trace_model(model, microbatch_size=size, dtype="float32"), size


@pytest.mark.parametrize("name", SHORT)
def test_a_deep_model_is_traced_once(name):
    build, smallest, spared = SHORT[name]
    model = loaded(build)
    family, traced = steps_traced(model)
    proofs = [1] if smallest == 1 else [1, 4]
    whole = [(0, size) for size in ([2] if smallest == 1 else [2, 1])]
    short = [(spared, size) for size in (2, 3, *proofs)]
    assert sorted(traced) == sorted([*whole, *short])
    assert not family.evaluates(smallest - 1)
    check(family, model)


@pytest.mark.parametrize("name", WHOLE)
def test_what_no_short_model_tells_is_traced_whole(name):
    model = loaded(WHOLE[name])
    family, traced = steps_traced(model)
    assert {(0, 2), (0, 3), (0, 1)} <= {*traced}
    check(family, model)


def test_a_tensor_grows_alike_for_all_that_read_it():
    whole, low, high = (
        record_step(loaded(lambda: Deep(PLAIN)), microbatch_size=size, dtype="float32", without=out)
        for size, out in ((2, ()), (2, ("blocks.7",)), (3, ("blocks.7",)))
    )
    units = find_layout(whole).units
    hashes = structure_hashes(whole, dict(enumerate(units)))
    steps = AffineSteps(low, high)
    twins = fewer_blocks._twins(units, hashes, low, high)
    assert steps.of_whole(whole, twins).at(2) == whole

    def grows(op):
        return any(low.values[each].shape != high.values[each].shape for each in made(low, op))

    op, twin = next(pair for pair in twins.items() if grows(pair[1]))
    still = next(t for t in twins.values() if not grows(t) and alike_wired(low, t, twin))
    with pytest.raises(NotAffineError):
        steps.of_whole(whole, {**twins, op: still})


def made(recording, op):
    return recording.ops[op].outputs


def alike_wired(recording, *ops):
    """Whether ops read and make as many tensors."""
    return len({(len(recording.ops[op].inputs), len(made(recording, op))) for op in ops}) == 1
