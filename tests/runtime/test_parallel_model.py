"""Steps make constants as the trace did."""

import pytest
import torch
from torch import nn

from planner.runtime.model import UserModel
from planner.runtime.parallel_model import ParallelModel
from planner.runtime.part import reference_part


class Bounded(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen = []

    def forward(self, x):
        self.seen.append(torch.get_default_dtype())
        y = self.linear(x)
        return torch.max(y, torch.full((), torch.finfo(y.dtype).min)).sum()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, None)],
)
def test_constants_of_a_step_have_the_dtype_of_the_parameters(dtype, expected):
    model = Bounded()
    user = UserModel(module="types", factory="none")
    recipe = {
        "microbatch_size": 2,
        "seed": 0,
        "max_grad_norm": 1.0,
        "configure_optimizer": lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    }
    parts = [reference_part(model, user, dtype)]
    trained = ParallelModel(user=user, parts=parts, num_microbatches=1, dtype=dtype, **recipe)
    trained.step_over([(torch.ones(2, 4), None)])
    assert model.seen == [expected or torch.float32]
    assert torch.get_default_dtype() == torch.float32
