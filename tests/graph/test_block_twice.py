"""Blocks that do something else when they run again, against recomputed real runs."""

import random

import pytest
import torch
from graph_models import wrap
from real_runs import build, recompute, run_loss
from torch import nn

import planner
from planner.errors import InfeasiblePlanError
from planner.graph.sizes.family import GraphFamily
from planner.strategy.facts import tried_facts

WIDTH = 8


class Cache:
    """Keys by block, as models keep them that also generate."""

    def __init__(self):
        self.keys = {}

    def update(self, block, keys):
        before = self.keys.get(block)
        self.keys[block] = keys if before is None else torch.cat((before, keys), 1)
        return self.keys[block]


def adds_to_a_cache(block, x, shared):
    """Attend to all keys of the cache."""
    keys = shared["cache"].update(block.index, block.key(x))
    return x + torch.softmax(x @ keys.mT, -1) @ keys


def reads_the_last_of_a_list(block, x, shared):
    """The same shapes again, and other numbers."""
    x = block.key(x) * shared["states"][-1]
    shared["states"].append(x)
    return x


def counts_its_calls(block, x, _):
    block.calls += 1
    return x + block.key(x * block.calls)


def makes_what_is_missing(block, x, shared):
    """The second time the projection is there."""
    name = f"keys {block.index}"
    if name not in shared:
        shared[name] = block.key(x)
    return x + shared[name]


def changes_an_input(block, x, shared):
    shared["shift"].add_(1)
    return x + block.key(x + shared["shift"])


def leaves_a_list_behind(block, x, shared):
    """What is added is read by nobody in the blocks."""
    shared["states"].append(x)
    return x + block.key(x)


def keeps_a_mask(block, x, _):
    if block.mask is None:
        ones = torch.ones(x.shape[1], x.shape[1], device=x.device)
        block.mask = ones.tril()[None] / x.shape[1]
    return x + block.mask @ block.key(x)


def shares_a_mask(block, x, shared):
    if "mask" not in shared:
        shared["mask"] = torch.arange(x.shape[1], device=x.device)[None, :, None] > 1
    return x + block.key(x) * shared["mask"]


def skips_by_chance(block, x, _):
    return x if random.random() < 0.5 else x + block.key(x)


def counts_in_a_buffer(block, x, _):
    block.seen += 1
    return x + block.key(x * block.seen)


def drops(block, x, _):
    return x + nn.functional.dropout(block.key(x), 0.5)


SAME = [
    leaves_a_list_behind, keeps_a_mask, shares_a_mask, skips_by_chance, counts_in_a_buffer, drops,
]  # fmt: skip
OTHER = {
    adds_to_a_cache: "cat reads a tensor of (2, 4, 8) that it left there itself",
    reads_the_last_of_a_list: "mul reads a tensor of (2, 4, 8) that it left there itself",
    counts_its_calls: "linear gets other arguments than the first time",
    makes_what_is_missing: "add reads a tensor of (2, 4, 8) that it left there itself",
    changes_an_input: "it changes in place a tensor of (2, 1, 1) that it is handed",
}


COUNTING = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.up, self.down = 0, nn.Linear(1024, 4096), nn.Linear(4096, 1024)

    def forward(self, x):
        self.calls += 1
        return x + self.down(torch.relu(self.up(x * self.calls)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def build_model():
    return Model()


def example_batch(size):
    return torch.randn(size, 512, 1024), None


def loss_fn(output, _):
    return output.float().pow(2).mean()
"""


class Block(nn.Module):
    """Does one of these things."""

    def __init__(self, does, index):
        super().__init__()
        self.does, self.index, self.calls, self.mask = does, index, 0, None
        self.key = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, shared):
        return self.does(self, x, shared)


class Model(nn.Module):
    """Hands its blocks a dict that lives as long as a forward."""

    def __init__(self, does):
        super().__init__()
        self.blocks = nn.ModuleList(Block(does, index) for index in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, shift):
        shared = {"cache": Cache(), "states": [x], "shift": shift}
        for block in self.blocks:
            x = block(x, shared)
        return self.head(x).pow(2).mean()


def loaded_model(does):
    batch = lambda size: ((torch.randn(size, 4, WIDTH), torch.ones(size, 1, 1)), None)  # noqa: E731
    return wrap(lambda: Model(does), batch, lambda output, _: output)


def gradients(loaded, graph, recomputation):
    """Those of a real run, or the error with which it ends."""
    model, batch = build(loaded, 2)
    random.seed(0)
    recompute(model, graph, recomputation, [name for name, _ in model.named_buffers()])
    torch.manual_seed(1)
    try:
        run_loss(loaded, model, batch).backward()
    except (RuntimeError, torch.utils.checkpoint.CheckpointError):
        return None
    return [parameter.grad for parameter in model.parameters()]


def are_equal(gradient, other):
    return gradient is other is None or torch.equal(gradient, other)


@pytest.mark.parametrize("does", [*SAME, *OTHER], ids=lambda does: does.__name__)
def test_recomputation_is_refused_where_a_real_run_fails_or_has_other_gradients(does):
    loaded = loaded_model(does)
    graphs = GraphFamily(loaded, dtype="float32")
    refusals = tried_facts(graphs, may_recompute=True).recompute_refusals
    graph = graphs.at(2)
    expected, found = (gradients(loaded, graph, each) for each in ("none", "full"))
    is_same = found is not None and all(map(are_equal, found, expected))
    assert is_same == (does in SAME)
    if does in OTHER:
        assert set(refusals) == {"selective", "full"}
        (reason,) = set(refusals.values())
        assert reason.startswith("blocks.")
        assert reason.endswith(OTHER[does].replace("(2, ", f"({graphs.smallest.microbatch_size}, "))
    else:
        assert not refusals
    assert not tried_facts(graphs, may_recompute=False).recompute_refusals


def test_where_nothing_fits_it_is_said_that_recomputation_was_left_out(tmp_path):
    """And inputs of blocks in host memory, which only recomputed blocks have, are not tried."""
    (tmp_path / "counting.py").write_text(COUNTING)
    request = {"gpus": 1, "global_batch_size": 4096, "fix": {"microbatch_size": 4096}}
    with pytest.raises(InfeasiblePlanError) as refused:
        planner.plan(str(tmp_path / "counting.py"), **request)
    assert (
        "activation_checkpointing=selective and full is left out: blocks.0.up does not do in "
        "backward what it did before: linear gets other arguments than the first time."
    ) in str(refused.value)
    assert "activation_offload" not in str(refused.value)
