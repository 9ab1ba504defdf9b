"""Steps make constants as the trace did; what is missing for weights is said."""

import sys

import pytest
import torch
from torch import nn

from planner.runtime.model import UserModel
from planner.runtime.parallel_model import ParallelModel
from planner.runtime.part import reference_part
from planner.runtime.processes import RunError


class Bounded(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen = []

    def forward(self, x):
        self.seen.append(torch.get_default_dtype())
        y = self.linear(x)
        return torch.max(y, torch.full((), torch.finfo(y.dtype).min)).sum()


def one_process(model, dtype=torch.float32):
    user = UserModel(module="types", factory="none")
    return ParallelModel(
        user=user,
        parts=[reference_part(model, user, dtype)],
        num_microbatches=1,
        microbatch_size=2,
        seed=0,
        max_grad_norm=1.0,
        configure_optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    )


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, None)],
)
def test_constants_of_a_step_have_the_dtype_of_the_parameters(dtype, expected):
    model = Bounded()
    one_process(model, dtype).step_over([(torch.ones(2, 4), None)])
    assert model.seen == [expected or torch.float32]
    assert torch.get_default_dtype() == torch.float32


def test_what_reads_safetensors_is_named_where_it_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(RunError, match=r"model.safetensors needs safetensors: pip install"):
        one_process(Bounded()).load_weights(path)
