"""Modules of several products: what is split inside them, and what is not."""

import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

from planner.graph.loading.load import load_model
from planner.graph.operator_graph import UnitKind
from planner.graph.sizes.family import trace_family
from planner.runtime.layout import PARTIAL, REPLICATE, REPLICATE_PARTIAL_GRAD, shard
from planner.runtime.op_call import Call, Operand
from planner.runtime.product_rules import grouped_shape, product_layouts
from planner.strategy.inner_strategies import inner_strategies
from planner.strategy.nodes import fold_unit
from planner.strategy.unit_context import UnitContext
from planner.vocabulary import Axis

OWN_WEIGHTS = Path(__file__).parents[1] / "run" / "own_weights.py"
TP = 2

MODEL = """
import sys
sys.path.insert(0, {folder!r})
import own_weights
from own_weights import Model, example_batch, loss_fn
from torch import nn
from torch.nn import functional


class Perceptron(own_weights.Perceptron):
    def forward(self, x):
        return {forward}


def build_model():
    model = Model()
    for block in model.blocks:
        block.perceptron.__class__ = Perceptron
    return model
"""
FOUND = {
    "functional.gelu(x @ self.first) @ self.second.t()": {("first", 1, 1), ("second", 1, 1)},
    "(x @ self.first).softmax(-1) @ self.second.t()": None,  # needs whole rows between them
    "functional.gelu(functional.gelu(x @ self.first) @ self.second.t())": None,  # of a sum
    "(x @ self.first) @ self.second.t() + x": None,  # what each rank would add
    "x @ self.first @ self.second.t() * self.first.sum()": None,  # a sum of its own
    "x @ self.first @ self.second.t() * x": {("first", 1, 1), ("second", 1, 1)},
}


def splits_of(file, module):
    graph = trace_family(load_model(str(file)), dtype="float32").at(2)
    unit = next(each for each in graph.units if each.kind is UnitKind.BLOCK)
    folded = fold_unit(graph, unit)
    context = UnitContext(
        graph=graph,
        constants=folded.constants,
        ranks=TP,
        axis=Axis.TP,
        experts=1,
        least_split=0,
        sequence=None,
        before=1,
        stream=REPLICATE,
        readers={},
    )
    node = next(each for each in folded.nodes if each.module.endswith(module))
    return node, inner_strategies(node, context)


def test_weights_are_split_where_products_meet():
    """The three dims of each weight, gate and up beside each other or not: one way holds."""
    node, found = splits_of(OWN_WEIGHTS, "experts")
    (way,) = {each.split for each in found}
    assert {(part.name, part.dim, part.fused) for part in way} == {
        ("into", 2, 2),
        ("out_of", 1, 1),
    }
    for each in found:
        assert set(each.inputs.values()) == {REPLICATE_PARTIAL_GRAD}
        assert each.layouts[node.outputs[0]] == PARTIAL


@pytest.mark.parametrize("forward", FOUND)
def test_what_stands_between_the_products_decides(forward, tmp_path):
    file = tmp_path / "model.py"
    file.write_text(MODEL.format(folder=str(OWN_WEIGHTS.parent), forward=forward))
    try:
        _, found = splits_of(file, "perceptron")
    finally:
        sys.modules.pop("own_weights", None)
    ways = [{(part.name, part.dim, part.fused) for part in each.split} for each in found]
    assert ways == ([FOUND[forward]] if FOUND[forward] else [])


def test_a_layer_of_many_weights_is_no_module_of_products(tmp_path):
    """All splits of a dozen weights that one op reads would be more than can be tried."""
    file = tmp_path / "model.py"
    source = OWN_WEIGHTS.read_text().replace("self.perceptron(x)", "self.perceptron(x)[0]")
    layers = "nn.LSTM(WIDTH, WIDTH, num_layers=3, batch_first=True)"
    file.write_text(source.replace("self.perceptron = Perceptron()", f"self.perceptron = {layers}"))
    _, found = splits_of(file, "perceptron")
    assert found == []


class GroupedProduct:
    name, is_pointwise, arguments = "_grouped_mm", False, ()


def parts(whole, layout):
    if layout is None:
        return [whole] * TP
    pieces = whole.chunk(layout.outer * TP, dim=layout.dim)
    return [torch.cat(pieces[rank::TP], dim=layout.dim) for rank in range(TP)]


GROUPED = {
    "rows by groups": ((48, 32), (3, 32, 64)),
    "gradient of the matrices": ((32, 48), (48, 64)),
}


@pytest.mark.parametrize("shapes", GROUPED.values(), ids=GROUPED)
def test_parts_of_grouped_products_give_the_parts_of_the_whole(shapes):
    """Every layout of both operands that the rule allows."""
    torch.manual_seed(0)
    operands = [torch.randn(shape) for shape in shapes]
    ends = torch.tensor([16, 32, 48], dtype=torch.int32)
    whole = nn.functional.grouped_mm(*operands, offs=ends)
    assert whole.shape == grouped_shape([*shapes, (3,)])
    layouts = [[None, *(shard(d, n) for d, n in product(range(len(s)), (1, 2)))] for s in shapes]
    held = set()
    for first, second in product(*layouts):
        if first is second is None:
            continue
        read = [Operand(s, each) for s, each in zip(shapes, (first, second), strict=True)]
        call = Call(GroupedProduct(), [*read, Operand((3,), None)], [tuple(whole.shape)])
        found, wanted = product_layouts(call, TP)
        if found is None:
            continue
        (result,) = found
        taken = [each or part for each, part in zip((first, second), wanted, strict=False)]
        ranks = zip(*(parts(o, each) for o, each in zip(operands, taken, strict=True)), strict=True)
        locals_ = [
            nn.functional.grouped_mm(a.contiguous(), b.contiguous(), offs=ends) for a, b in ranks
        ]
        expected = [whole] * TP if result == PARTIAL else parts(whole, result)
        if result == PARTIAL:
            locals_ = [sum(locals_)] * TP
        for local, part in zip(locals_, expected, strict=True):
            torch.testing.assert_close(local, part, rtol=1e-4, atol=1e-4)
        held.add(str(result))
    assert held >= ({"Shard(1)", "Partial"} if len(shapes[1]) == 3 else {"Shard(1)", "Shard(2)"})


def test_parts_that_the_kernel_does_not_take_are_refused():
    for size, is_taken in ((32, True), (24, False), (40, False)):
        operands = [Operand((48, 16), None), Operand((3, 16, size), shard(2)), Operand((3,), None)]
        found, _ = product_layouts(Call(GroupedProduct(), operands, [(48, size)]), TP)
        assert (found is not None) == is_taken
