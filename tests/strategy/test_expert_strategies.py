"""Modules of experts, and what only looks like one."""

from pathlib import Path

import pytest

from planner.cost.work import shares_of
from planner.graph.loading.load import load_model
from planner.graph.operator_graph import UnitKind
from planner.graph.sizes.family import trace_family
from planner.runtime.layout import REPLICATE, shard
from planner.strategy.expert_strategies import expert_strategies, experts_of
from planner.strategy.facts import model_facts
from planner.strategy.nodes import NodeKind, fold_unit
from planner.strategy.unit_context import UnitContext
from planner.vocabulary import Axis, Style

ROUTED = Path(__file__).parents[1] / "run" / "routed_experts.py"
ROWS, FEATURES, TOP, EXPERTS = 2 * 16, 32, 2, 8

MODEL = """
import sys
sys.path.insert(0, {folder!r})
import routed_experts
import torch
from routed_experts import DIM, Model, example_batch, loss_fn


class Experts(routed_experts.Experts):
    def forward(self, rows, chosen, weights):
        top, experts = chosen.shape[1], chosen.reshape(-1)
        {before}
        hidden = rows.repeat_interleave(top, dim=0)[:, None]
        hidden = (hidden @ self.into[experts]).relu() @ self.out_of[experts]
        hidden = hidden.squeeze(1) + self.bias[experts]
        hidden = (hidden * weights.reshape(-1, 1)).view(-1, top, DIM)
        return {after}


def build_model():
    model = Model()
    for block in model.blocks:
        block.ffn.experts.__class__ = Experts
    return model
"""
OTHERS = {
    "": "hidden.sum(1)",
    "weights = weights.sqrt()": "hidden.sum(1)",
    "weights = weights.softmax(-1)": None,  # needs the weights of all experts of a row
    "weights = weights / weights.sum(-1, keepdim=True)": None,
    "rows = rows - rows.mean(0)": None,  # needs the rows that went to other ranks
    "rows = rows @ self.into.sum(0)[:, :DIM]": None,  # needs all experts
    "rows = rows + self.bias[0]": None,  # needs one expert for the rows of all
    "rows = rows + self.bias[torch.arange(1)]": None,
    "rows = rows @ rows.T @ rows": None,
}
RESULTS = {
    "hidden.sum(1)": True,
    "hidden.sum(1).to(torch.float64).to(rows.dtype)": True,
    "hidden.mean(1)": False,
    "hidden.sum(1).relu()": False,  # of the whole sum
    "hidden.amax(1)": False,
    "(weights[:, None] @ hidden).squeeze(1).relu()": False,
    "torch.zeros_like(rows).index_add(0, torch.arange(len(rows)), hidden.sum(1))": True,
    "hidden.sum(1) / hidden.sum(1).norm()": False,
}


def experts_in(file):
    graph = trace_family(load_model(str(file)), dtype="float32").at(2)
    unit = next(each for each in graph.units if each.kind is UnitKind.BLOCK)
    folded = fold_unit(graph, unit)
    modules = [each for each in folded.nodes if each.kind is NodeKind.MODULE]
    return graph, folded, {each.module: experts_of(each, graph) for each in modules}


def written(folder, before, after):
    path = folder / "changed.py"
    path.write_text(MODEL.format(folder=str(ROUTED.parent), before=before or "pass", after=after))
    return path


def test_a_module_of_experts_is_known_by_what_it_reads_and_does():
    graph, folded, found = experts_in(ROUTED)
    (name,) = (name for name, each in found.items() if each is not None)
    assert name.endswith("ffn.experts")
    assert found[name].number == EXPERTS
    assert set(found[name].parameters) == {"into", "out_of", "bias"}
    rows = found[name]
    assert rows.rows_bytes == ROWS * TOP * FEATURES * 4
    assert rows.weights_bytes == ROWS * TOP * 4
    assert (rows.experts_of_row, rows.has_trained_weights) == (TOP, True)
    assert model_facts(graph).experts == (EXPERTS,)
    node = next(each for each in folded.nodes if each.module == name)
    assert [len(strategies_of(graph, folded, node, ranks)) for ranks in (2, 4, 8, 3, 16)] == [
        1, 1, 1, 0, 0,
    ]  # fmt: skip
    (way,) = strategies_of(graph, folded, node, 4)
    assert way.style == Style.EXPERTS
    assert {(each.name, each.dim) for each in way.split} == {
        ("into", 0), ("out_of", 0), ("bias", 0)
    }  # fmt: skip
    assert all(layout == REPLICATE for layout in (*way.inputs.values(), *way.outputs.values()))


def test_ranks_of_tp_take_parts_of_the_rows():
    """Of 2 x 16 rows, tp 2: two in the stream's order where it is split, else side by side."""
    graph, folded, found = experts_in(ROUTED)
    node = next(each for each in folded.nodes if found.get(each.module) is not None)
    for before in (1, 2):
        ways = strategies_of(graph, folded, node, 4, tp=2, before=before)
        part = shard(0, before)
        assert {way.outputs[node.outputs[0]] for way in ways} == {part, REPLICATE}
        for way in ways:
            assert set(way.inputs.values()) == {part}
            (alone,) = strategies_of(graph, folded, node, 4)
            assert way.routed.rows_bytes * 2 == alone.routed.rows_bytes
            assert way.routed.weights_bytes * 2 == alone.routed.weights_bytes
            assert way.routed.counts_bytes == alone.routed.counts_bytes == EXPERTS * 8
            shares = shares_of(way, 2)
            assert {shares(value) for value in way.routed.weights} == {1 / 4}
            assert shares.of_work == shares(node.inputs[0]) == 1 / 2
    assert not strategies_of(graph, folded, node, 6, tp=3), "32 rows, 8 experts"


def strategies_of(graph, folded, node, experts, *, tp=1, before=1):
    context = UnitContext(
        graph=graph,
        constants=folded.constants,
        ranks=experts if tp == 1 else tp,
        axis=Axis.EP if tp == 1 else Axis.TP,
        experts=experts,
        least_split=0,
        sequence=None,
        before=before,
        stream=REPLICATE,
        readers={},
    )
    return expert_strategies(node, context)


@pytest.mark.parametrize("before", OTHERS)
def test_what_needs_more_than_its_own_experts_is_none(before, tmp_path):
    *_, found = experts_in(written(tmp_path, before, "hidden.sum(1)"))
    assert any(found.values()) == (OTHERS[before] is not None)


@pytest.mark.parametrize("after", RESULTS)
def test_what_is_no_sum_over_second_is_none(after, tmp_path):
    *_, found = experts_in(written(tmp_path, "", after))
    assert any(found.values()) == RESULTS[after]
