"""What stages of a pipeline hold beside what they keep: inputs, and gradients that they send."""

from pathlib import Path

import pytest

import planner
from planner.checking.check import check_plan

MODEL = """
import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shrink = nn.Conv1d(1, 64, 1024, stride=1024)
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.head = nn.Linear(64, 64)

    def forward(self, sound: Tensor) -> Tensor:
        x = self.shrink(sound[:, None]).transpose(1, 2).contiguous()
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build_model() -> nn.Module:
    return Model()


def example_batch(microbatch_size: int) -> tuple[Tensor, Tensor]:
    sound = torch.randn(microbatch_size, 1024 * 128)
    return sound, torch.zeros(microbatch_size, 128, 64)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()
"""


@pytest.mark.parametrize(
    "fix", [{"schedule": "1F1B"}, {"schedule": "GPipe", "activation_checkpointing": "full"}]
)
def test_stages_hold_the_inputs_while_a_forward_runs(fix, tmp_path):
    (tmp_path / "sound.py").write_text(MODEL)
    planner.estimate(
        str(tmp_path / "sound.py"),
        gpus=2,
        cluster="h100-sxm",
        dtype="float32",
        global_batch_size=64,
        fix={"microbatch_size": 16, "pp": 2, **fix},
    ).save(tmp_path / "plan")
    for stage in check_plan(tmp_path / "plan").stages:
        assert stage.predicted_peak_bytes == pytest.approx(stage.tracked_peak_bytes, rel=0.05)


DOUBLE_CONVS = Path(__file__).parents[1] / "graph" / "zoo" / "double_convs.py"


def test_gradients_that_are_sent_are_not_held_through_the_next_backward(tmp_path):
    """A schedule of torch keeps the list of their sends: 6% of the stage that receives skips."""
    planner.estimate(
        f"{DOUBLE_CONVS}:unet",
        gpus=2,
        cluster="h100-sxm",
        dtype="float32",
        global_batch_size=16,
        fix={"microbatch_size": 4, "pp": 2, "schedule": "1F1B"},
    ).save(tmp_path / "plan")
    stage = check_plan(tmp_path / "plan").stages[-1]
    assert stage.predicted_peak_bytes == pytest.approx(stage.tracked_peak_bytes, rel=0.035)
