"""How the ops of a unit fold into nodes."""

import torch
from torch import nn

from planner.graph.loading.load import wrap_module
from planner.graph.trace import trace_model
from planner.pricing.sharding_ilp import is_solvable
from planner.runtime.layout import SplitAxis
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
    problem = sharding_problem(
        graph, fold_unit(graph, unit), over=SplitAxis("tp", 2), sequence_dim=None
    )
    assert all(problem.strategies)


class TwoStacks(nn.Module):
    """A table that is read between two lists of blocks, as decoders have it."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.table = nn.Embedding(16, 8)
        self.decoder = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x, tokens):
        for block in self.encoder:
            x = block(x)
        y = self.table(tokens) * 2
        for block in self.decoder:
            y = block(y)
        return (x + y).square().mean()


def test_a_table_between_blocks_stays_whole_or_the_layout_is_none():
    def batch(size):
        return (torch.randn(size, 4, 8), torch.randint(0, 16, (size, 4))), None

    graph = trace_model(
        wrap_module(TwoStacks, example_batch=batch), microbatch_size=2, dtype="float32"
    )
    (unit,) = [unit for unit in graph.units if unit.name == "encoder.1"]
    solvable = {
        split: is_solvable(
            sharding_problem(
                graph,
                fold_unit(graph, unit),
                over=SplitAxis("tp", 2),
                sequence_dim=None,
                split_tables=split,
            )
        )
        for split in (True, False)
    }
    assert solvable == {True: False, False: True}
