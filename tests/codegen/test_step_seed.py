"""What user code draws outside torch is drawn alike by ranks that share samples."""

import random

import numpy as np
import torch
from torch import nn

from planner.runtime.data import drawn_microbatches
from planner.runtime.model import UserModel
from planner.runtime.parallel_model import ParallelModel
from planner.runtime.part import Part


class Drawn(nn.Module):
    """Notes what each forward draws."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.draws = []

    def forward(self, x):
        self.draws.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
        return self.layer(x).mean()


def draws_of(prelude):
    """What three microbatches of two steps draw, after something else was drawn."""
    torch.manual_seed(0)
    net = Drawn()
    recipe = {
        "microbatch_size": 2,
        "seed": 5,
        "max_grad_norm": 1.0,
        "configure_optimizer": lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    }
    model = ParallelModel(
        user=UserModel(module="types", factory="x"),
        parts=[Part(net, user=First(), blocks=())],
        num_microbatches=3,
        **recipe,
    )
    for _ in range(2):
        prelude()
        model.step((torch.ones(6, 3), torch.ones(6)))
    return net.draws


class First:
    """Offers a loss."""

    def loss(self, output, _):
        return output


def drawn_elsewhere():
    random.random()
    np.random.rand()
    torch.rand(())


def test_draws_of_python_and_numpy_follow_from_the_seed_and_the_step():
    found = draws_of(drawn_elsewhere)
    assert found == draws_of(lambda: None)
    assert all(len(set(each)) == 6 for each in zip(*found, strict=True))


def test_draws_between_steps_go_on_as_without_them():
    random.seed(1)
    np.random.seed(1)
    expected = [(random.random(), np.random.rand()) for _ in range(2)]
    random.seed(1)
    np.random.seed(1)
    between = []
    draws_of(lambda: between.append((random.random(), np.random.rand())))
    assert between == expected


def test_samples_drawn_by_python_and_numpy_follow_from_the_seed_and_their_place():
    def example_batch(num_samples):
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor([drawn] * num_samples), torch.zeros(num_samples)

    user = UserModel(module="types", factory="x", functions={"example_batch": example_batch})
    random.seed(1)
    before = random.getstate()
    ((whole, _),) = drawn_microbatches(user, 5, 2, range(4), 4)
    assert random.getstate() == before
    ((half, _),) = drawn_microbatches(user, 5, 2, range(2, 4), 2)
    assert torch.equal(half, whole[2:])
    assert all(len(set(column.tolist())) == 4 for column in whole.T)
