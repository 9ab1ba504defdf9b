"""Layouts are given only after the script's runtime has run them."""

import pytest

from planner.graph.loading.load import load_model
from planner.graph.operator_graph import UnitKind
from planner.graph.sizes.family import trace_family
from planner.graph.trial import Refusal
from planner.hardware.profiles import load_cluster
from planner.pricing.choice import ShardingChoice, unit_problem
from planner.pricing.instructions import (
    RunnableUnit,
    module_shardings,
    runnable_block,
    tried_over,
)
from planner.pricing.model_pricing import ModelPricer
from planner.pricing.sharding_ilp import solve_sharding
from planner.strategy.nodes import fold_unit
from planner.vocabulary import Axis, split_styles

CHOICE = ShardingChoice(tp=2, sequence_parallel=False, split_tables=False, microbatch_size=4)


@pytest.fixture(scope="module")
def block(big_gpt):
    return next(unit for unit in big_gpt.at(4).units if unit.kind is UnitKind.BLOCK)


@pytest.fixture(scope="module")
def solve(big_gpt, block):
    rank = ModelPricer(big_gpt, load_cluster("h100-sxm", gpus=2), "bfloat16").rank(CHOICE)

    def solved(whole):
        return solve_sharding(
            unit_problem(big_gpt.at(4), fold_unit(big_gpt.at(4), block), CHOICE, whole), rank
        )

    return solved


def over_tp(modules):
    return [tried_over(CHOICE, modules)]


class RefusesModules:
    """Refuses what splits modules of some names."""

    def __init__(self, *names):
        self.names = names
        self.tries = 0

    def block(self, unit, layouts):
        self.tries += 1
        for each in (module for layout in layouts for module in layout.modules):
            if each.split and each.module in self.names:
                return Refusal(module=f"{unit.name}.{each.module}", reason="no")
        return None


def test_what_is_refused_is_left_whole_and_the_rest_stays_split(block, solve):
    first = module_shardings(solve(frozenset()))
    split = {each.module for each in first if each.split}
    trial = RefusesModules("mlp.c_fc")
    found = runnable_block(trial, block, solve, over_tp)
    assert isinstance(found, RunnableUnit)
    assert trial.tries == 2
    assert [(each.module, each.reason) for each in found.whole] == [("mlp.c_fc", "no")]
    left = {each.module for each in module_shardings(found.solution) if each.split}
    assert "mlp.c_fc" in split
    assert "mlp.c_fc" not in left
    assert "attn.c_attn" in left


def test_a_block_that_runs_in_no_layout_is_refused(block, solve):
    class RefusesAll:
        def block(self, unit, layouts):
            return Refusal(module="", reason="never")

    found = runnable_block(RefusesAll(), block, solve, over_tp)
    assert found == Refusal(module="", reason="never")


def test_the_runtime_runs_what_is_right_and_names_what_is_not(big_gpt, block, solve):
    trial = big_gpt.trial(4)
    modules = module_shardings(solve(frozenset()))
    assert trial.block(block, over_tp(modules)) is None
    one_sided = [each for each in modules if each.module != "mlp.c_proj"]
    refusal = trial.block(block, over_tp(one_sided))
    assert refusal is not None
    assert refusal.module == f"{block.name}.mlp.c_proj"
    assert "addmm" in refusal.reason


ROWS = """
import torch
from torch import nn


def build_model():
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))


def example_batch(size):
    return torch.randn(size, 64, 256), torch.randn(size, 64, 256)


loss_fn = nn.functional.mse_loss
"""


def test_a_block_that_is_one_module_is_left_whole(tmp_path):
    """Its path in itself is the empty one: asked to be whole, it was split again without end."""
    (tmp_path / "rows.py").write_text(ROWS)
    family = trace_family(load_model(str(tmp_path / "rows.py"), seq_len=None), dtype="bfloat16")
    graph = family.at(4)
    block = next(unit for unit in graph.units if unit.kind is UnitKind.BLOCK)
    styles = [
        {s.style for found in problem.strategies for s in found}
        for problem in (
            unit_problem(graph, fold_unit(graph, block), CHOICE, whole)
            for whole in (frozenset(), frozenset({""}))
        )
    ]
    assert not styles[0].isdisjoint(split_styles(Axis.TP))
    assert styles[1].isdisjoint(split_styles(Axis.TP))
