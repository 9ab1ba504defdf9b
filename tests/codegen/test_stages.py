"""Wherever tracing says that a model can be cut, its stages compute what the model computes.

All stages run in one process, each cut off from the others as torch's pipeline does it.
"""

from pathlib import Path

import pytest
import random_model
import torch
from torch import nn

from planner.graph.loading.load import load_model, wrap_module
from planner.graph.trace import trace_model
from planner.runtime.anatomy import copied, examine
from planner.runtime.model import UserModel, run_model, user_module
from planner.runtime.pipeline import examples
from planner.runtime.stages import Stage, StageSpec
from planner.runtime.trees import cast_floats

ROOT = Path(__file__).parents[2]
ZOO = ROOT / "tests" / "graph" / "zoo"
NUM_RANDOM_MODELS = 40


class RandomUser:
    """Stands for the model file of a random model."""

    @staticmethod
    def loss(output, targets):
        return random_model.loss_fn(output, targets)


def specs_of(graph):
    """One stage between each two neighbouring cuts."""
    num_blocks = len(graph.units) - 2
    edges = [0, *(cut.after_unit + 1 for cut in graph.cuts), len(graph.units)]
    crossings = [None, *graph.cuts]
    return tuple(
        StageSpec(
            index,
            max(edges[index] - 1, 0),
            min(edges[index + 1] - 1, num_blocks),
            receives=tuple((o.module, o.index) for o in cut.carried) if cut else (),
            stream_output=(cut.stream_output.module, cut.stream_output.index)
            if cut and cut.stream_output
            else None,
        )
        for index, cut in enumerate(crossings)
    )


def run_forward(stages, batch):
    """Return what each stage got and sent, with no graph from one to the next."""
    calls, sent = [], ()
    for stage in stages:
        received = [t.detach().requires_grad_(t.requires_grad) for t in sent]
        if not stage.is_first:
            expected = examples(stage, None, after=False)
            assert [looks(t) for t in received] == [looks(t) for t in expected]
        output = stage(*received, **batch)
        sent = output if isinstance(output, tuple) else (output,)
        calls.append((received, sent))
    return calls


def looks(tensor):
    return tensor.shape, tensor.dtype, tensor.requires_grad


def run_backward(calls):
    grads = [None]
    for received, sent in reversed(calls):
        pairs = [(t, g) for t, g in zip(sent, grads, strict=True) if t.requires_grad]
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in received]


def check_stages(graph, model, user, inputs, targets):
    model, inputs = model.double(), cast_floats(inputs, torch.float64)
    whole = copied(model, {})
    expected = user.loss(run_model(whole, inputs), targets)
    expected.backward()
    blocks = tuple(unit.name for unit in graph.units[1:-1])
    anatomy = examine(model, blocks, inputs, torch.float64)
    specs = specs_of(graph)
    stages = [Stage(model, anatomy, user, specs, index) for index in range(len(specs))]
    for stage in stages:
        stage.dtype = torch.float64
        stage.register_late_hooks()
    calls = run_forward(stages, {"inputs": inputs, "targets": targets})
    torch.testing.assert_close(calls[-1][1][0], expected)
    run_backward(calls)
    found = dict(model.named_parameters())
    for name, parameter in whole.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name].grad, parameter.grad)


@pytest.mark.parametrize(
    ("file", "num_stages"),
    [
        (ZOO / "t5.py", 8),
        (ZOO / "dit.py", 6),
        (ROOT / "tests" / "run" / "tuple_blocks.py", 7),
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else None,
)
def test_a_model_cut_everywhere(file, num_stages):
    user = UserModel(file=file, factory="build_model")
    graph = trace_model(load_model(str(file)), microbatch_size=2, dtype="float64")
    assert len(graph.cuts) == num_stages - 1
    torch.manual_seed(0)
    check_stages(graph, user_module(user).build_model(), user, *user.example_batch(2))


def test_random_models_cut_everywhere():
    num_cuts = num_carried = num_refused = 0
    for seed in range(NUM_RANDOM_MODELS):
        loaded = wrap_module(
            lambda seed=seed: random_model.RandomModel(seed),
            example_batch=random_model.batch,
            loss_fn=random_model.loss_fn,
        )
        graph = trace_model(loaded, microbatch_size=2, dtype="float64")
        num_cuts += len(graph.cuts)
        num_carried += sum(len(cut.carried) for cut in graph.cuts)
        num_refused += len(graph.refused_cuts)
        torch.manual_seed(seed)
        model = random_model.RandomModel(seed)
        check_stages(graph, model, RandomUser(), *random_model.batch(2))
    assert num_cuts > 2 * NUM_RANDOM_MODELS
    assert num_carried > NUM_RANDOM_MODELS
    assert num_refused > 0


class Listening(nn.Module):
    """Reads by their places what hooks have kept of blocks, one of which changes its result."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.kept = []
        for block in self.blocks:
            block.register_forward_hook(lambda _, __, output: self.kept.append(output))
        self.blocks[1].register_forward_hook(lambda _, __, output: output * 2)

    def forward(self, x):
        self.kept.clear()
        x = self.blocks(x).tanh()
        return x + self.kept[2] * self.kept[3]


class MeanUser:
    """Stands for its model file."""

    @staticmethod
    def loss(output, _):
        return output.square().mean()


def test_hooks_that_hold_the_model_keep_what_other_stages_made():
    loaded = wrap_module(
        Listening,
        example_batch=lambda size: (torch.randn(size, 4), None),
        loss_fn=MeanUser.loss,
    )
    graph = trace_model(loaded, microbatch_size=2, dtype="float64")
    assert len(graph.cuts) == 4
    torch.manual_seed(0)
    check_stages(graph, Listening(), MeanUser(), torch.randn(2, 4), None)
