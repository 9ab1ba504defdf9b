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


class Stack(nn.Module):
    """Blocks between a table and a head that is a product with the table."""

    def __init__(self, block):
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([block() for _ in range(2)])

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return (x @ self.table.weight.T).square().mean()


def problems(block, names):
    def batch(size):
        return (torch.randint(0, 16, (size, 4)),), None

    graph = trace_model(
        wrap_module(lambda: Stack(block), example_batch=batch), microbatch_size=2, dtype="float32"
    )
    return [
        sharding_problem(
            graph, fold_unit(graph, unit), over=SplitAxis("tp", 2), sequence_dim=sequence_dim
        )
        for unit in graph.units
        if unit.name in names
        for sequence_dim in (None, 1)
    ]


def ways(problem, module):
    return {
        way.style
        for node, found in zip(problem.folded.nodes, problem.strategies, strict=True)
        if node.module == module
        for way in found
    }


def test_a_table_that_a_product_outside_its_module_reads_stays_whole():
    for problem in problems(lambda: nn.Linear(8, 8), ("prologue",)):
        assert ways(problem, "table") == {"replicate"}


class TwoNorms(nn.Module):
    """Two norms of one weight, of which one may run on a part."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.RMSNorm(8), nn.RMSNorm(8)
        self.second.weight = self.first.weight
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.second(self.down(self.up(self.first(x))))


def test_modules_that_share_a_weight_run_on_no_part():
    split = problems(TwoNorms, ("blocks.1",))[1]
    assert ways(split, "blocks.1.first") == {"replicate"}
    assert "column" in ways(split, "blocks.1.up")


class NormOfEnds(nn.Module):
    """A norm that runs twice, its last result being the block's."""

    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return self.norm(self.up(self.norm(x)))


def test_calls_of_one_module_have_the_same_ways_at_the_end_of_a_block():
    for problem in problems(NormOfEnds, ("blocks.1",)):
        nodes = [node for node in problem.folded.nodes if node.module == "blocks.1.norm"]
        numbers = [len(problem.strategies[node.index]) for node in nodes]
        assert len(numbers) == 2
        assert len(set(numbers)) == 1
        assert is_solvable(problem)
