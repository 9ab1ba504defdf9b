"""Models of any size, built without weights."""

from planner.codegen.undrawn import undrawn_model
from planner.runtime.first_weights import DeferredInit
from planner.runtime.model import UserModel

MODEL = """
import torch
from torch import nn


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2**14, 2**14, 2**14))  # 16 TiB
        nn.init.normal_(self.weight)
        self.register_buffer("scale", torch.full((3,), 2.0))


def build_model():
    return Experts()
"""


def test_what_no_machine_holds_is_built(tmp_path):
    (tmp_path / "experts.py").write_text(MODEL)
    draw = DeferredInit._draw
    user = UserModel(file=tmp_path / "experts.py", factory="build_model")
    model = undrawn_model(user)
    assert model.weight.is_meta
    assert model.weight.shape == (2**14,) * 3
    assert model.scale.tolist() == [2.0, 2.0, 2.0]
    assert DeferredInit._draw is draw
