"""What a checkpoint holds beside weights: buffers, and whatever optimisers keep."""

import pytest
import torch
from torch import nn

from planner.runtime.checkpoint import load_state, state_of
from planner.runtime.checkpoint_folders import CheckpointWriter
from planner.runtime.first_weights import parameters_on_meta
from planner.runtime.loaders import read_extra
from planner.runtime.model import UserModel
from planner.runtime.parallel_model import ParallelModel
from planner.runtime.part import Part
from planner.runtime.processes import RunError


def trained(make_optimizer, seed, *, steps=2):
    """A model with running statistics, and its optimiser after some steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model.unused = nn.Parameter(torch.ones(2))  # has no gradient, and so no state
    part = Part(model, user=None, blocks=())
    optimizer = make_optimizer(part.parameters())
    take_steps(model, optimizer, range(steps))
    return part, optimizer


def take_steps(model, optimizer, seeds):
    for seed in seeds:
        torch.manual_seed(seed)
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 2])
def test_training_goes_on_as_if_unbroken(tmp_path, name, steps):
    part, optimizer = trained(OPTIMIZERS[name], 0, steps=steps)
    state = state_of([part], [optimizer]) | {"extra.loader": b"at 3"}
    saved = tmp_path / "saved"
    CheckpointWriter().write(state, saved, wait=True)
    other, its_optimizer = trained(OPTIMIZERS[name], 1, steps=1 if steps else 0)
    load_state([other], [its_optimizer], saved)
    assert read_extra(saved, "loader") == b"at 3"
    assert read_extra(saved, "other") is None
    for model, its in ((part.model, optimizer), (other.model, its_optimizer)):
        take_steps(model, its, range(5, 8))
    for key, value in part.model.state_dict().items():
        assert torch.equal(other.model.state_dict()[key], value), key


def test_states_of_another_shape_are_refused_by_name():
    part, optimizer = trained(lambda parameters: torch.optim.Adafactor(parameters, lr=0.1), 0)
    with pytest.raises(RunError, match=r"keeps row_var of 0\.weight, of shape \(4, 1\)"):
        state_of([part], [optimizer])


def test_what_was_built_without_values_is_told():
    with parameters_on_meta():
        empty = Part(nn.Linear(2, 2), user=None, blocks=())
    empty.move_to(torch.device("cpu"), torch.float32)
    empty.materialise()
    model = ParallelModel(
        user=UserModel(module="types", factory="x"),
        parts=[empty],
        num_microbatches=1,
        microbatch_size=1,
        seed=0,
        max_grad_norm=1.0,
        configure_optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    )
    with pytest.raises(RunError, match="load or load_weights comes first"):
        model.step((torch.ones(1, 2), torch.ones(1)))
    with torch.device("meta"):
        statistics = nn.BatchNorm1d(2)
    with pytest.raises(RunError, match="buffer running_mean lies on the meta device"):
        Part(statistics, user=None, blocks=()).move_to(torch.device("cpu"), torch.float32)
