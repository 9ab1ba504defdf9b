"""How the ops of a unit fold into nodes."""

import torch
from torch import nn

from planner.graph.loading.load import wrap_module
from planner.graph.trace import trace_model
from planner.strategy.nodes import NodeKind, fold_unit
from planner.strategy.problem import sharding_problem


class ClassToken(nn.Module):
    """A learned token before the others, as vision transformers have it."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.embed = nn.Linear(4, 8)
        self.head = nn.Linear(8, 8)

    def forward(self, patches):
        token = self.token.expand(patches.shape[0], -1, -1)
        return self.head(torch.cat((token, self.embed(patches)), 1)).sum()


def test_views_of_parameters_belong_to_the_glue_that_reads_them():
    loaded = wrap_module(ClassToken, example_batch=lambda size: (torch.randn(size, 3, 4), None))
    graph = trace_model(loaded, microbatch_size=2, dtype="float32")
    (unit,) = graph.units
    folded = fold_unit(graph, unit)
    (glue,) = [
        node
        for node in folded.nodes
        if node.kind is NodeKind.REGION and "cat" in {graph.nodes[op].name for op in node.ops}
    ]
    assert [graph.nodes[op].name for op in glue.ops] == ["expand", "cat"]
    (embed,) = [node for node in folded.nodes if node.module == "embed"]
    assert glue.inputs == embed.outputs
    problem = sharding_problem(graph, unit, tp=2, sequence_dim=None)
    assert all(problem.strategies)
