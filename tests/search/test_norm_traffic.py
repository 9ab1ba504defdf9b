"""What a step tells of the norm of its gradients: one number for each parameter that gets one."""

from searches import request_for

from planner.graph.loading.load import load_model
from planner.graph.sizes.family import trace_family
from planner.hardware.profiles import load_cluster
from planner.search.run import Search

MODEL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = nn.Linear(64, 64)
        self.beside = nn.Linear(64, 64)

    def forward(self, x, y):
        return x + self.own(x + y), y + self.beside(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        y = x
        for block in self.blocks:
            x, y = block(x, y)
        return x  # what the last block adds to y is read by nobody


def build_model():
    return Model()


def example_batch(microbatch_size):
    return torch.randn(microbatch_size, 8, 64), torch.randn(microbatch_size, 8, 64)


def loss_fn(outputs, targets):
    return (outputs - targets).square().mean()
"""


def test_a_parameter_without_a_gradient_has_no_part_in_the_norm(tmp_path):
    (tmp_path / "model.py").write_text(MODEL, encoding="utf-8")
    graphs = trace_family(load_model(str(tmp_path / "model.py")), dtype="bfloat16")
    cluster = load_cluster("h100-sxm", gpus=2)
    request = request_for(cluster, batch=4, dp_shard=2)
    search = Search(graphs, cluster, request, resize=lambda gpus: cluster)
    plan = search.run().best
    (norm,) = (
        row
        for row in search.traffic_rows(plan)
        if row.kind == "all_reduce" and row.axis == "dp_shard"
    )
    weights_and_biases, without = 2 * 2 * 3, 2
    assert norm.bytes == 4 * (weights_and_biases - without)
