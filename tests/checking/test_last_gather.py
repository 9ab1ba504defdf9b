"""Memory of one microbatch without a pipeline: the last gather's buffer lasts to the loss."""

import planner
from planner.checking.check import check_plan

MODEL = """
import torch
from torch import nn
from torch.nn import functional


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out_of = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, stream):
        return stream + self.out_of(functional.gelu(self.into(stream)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Perceptron() for _ in range(2))
        self.head = nn.Linear(64, 8)

    def forward(self, stream):
        for block in (*self.blocks,) * 4:  # none runs once, so that all are gathered at once
            stream = block(stream)
        return self.head(stream.mean(1))


def build_model():
    return Net()


def example_batch(size):
    return torch.randn(size, 24, 64), torch.zeros(size, dtype=torch.int64)


def loss_fn(output, targets):
    return functional.cross_entropy(output, targets)
"""


def test_a_forward_holds_the_buffer_of_its_last_gather(tmp_path):
    (tmp_path / "net.py").write_text(MODEL)
    result = planner.estimate(
        str(tmp_path / "net.py"), gpus=2, cluster="cpu", dtype="float32", global_batch_size=8,
        fix={"dp_shard": 2, "microbatch_size": 4, "reshard_after_forward": False,
             "activation_checkpointing": "none"},
    )  # fmt: skip
    result.save(tmp_path / "plan")
    (stage,) = check_plan(tmp_path / "plan").stages
    assert abs(stage.error) <= 0.03, stage
