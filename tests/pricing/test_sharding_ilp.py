"""The first ILP: exact against enumeration, and the layouts that are known to be right."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.node_pricing import RankSpec, conversion_s
from planner.graph.operator_graph import UnitKind
from planner.hardware.profiles import load_cluster
from planner.hardware.topology import MeshAxis, comm_group
from planner.pricing.sharding_ilp import (
    conversions_of,
    is_solvable,
    price_strategies,
    solve_sharding,
)
from planner.runtime.layout import REPLICATE_PARTIAL_GRAD, SplitAxis
from planner.strategy.nodes import NodeKind, fold_unit
from planner.strategy.problem import sharding_problem


def rank_of(*, tp, bandwidth=1.0, latency=1.0, compute=1.0):
    cluster = load_cluster("h100-sxm", gpus=8)
    link = replace(
        cluster.links[0],
        bandwidth_bytes_per_s=cluster.links[0].bandwidth_bytes_per_s * bandwidth,
        latency_s=cluster.links[0].latency_s * latency,
        base_latency_s=cluster.links[0].base_latency_s * latency,
    )
    device = replace(
        cluster.device,
        host_dispatch_s=0.0,
        peak_flop_per_s={k: v * compute for k, v in cluster.device.peak_flop_per_s.items()},
    )
    group = comm_group(
        replace(cluster, links=(link, *cluster.links[1:])), MeshAxis(size=tp, stride=1)
    )
    return RankSpec(device=device, dtype="bfloat16", tp_group=group)


def unit_of(graph, kind):
    units = [unit for unit in graph.units if unit.kind is kind]
    return units[min(1, len(units) - 1)]


def enumerated_s(problem, prices, prices_of_change):
    """Least objective over all consistent choices of one strategy per node."""
    nodes = problem.folded.nodes
    producer = {value: node.index for node in nodes for value in node.outputs}
    best = float("inf")
    for positions in product(*(range(len(s)) for s in problem.strategies)):
        chosen = tuple(s[k] for s, k in zip(problem.strategies, positions, strict=True))
        consistent = all(
            strategy.inputs[value]
            == (chosen[producer[value]].outputs[value] if value in producer else problem.boundary)
            for node, strategy in zip(nodes, chosen, strict=True)
            if node.kind is not NodeKind.MODULE
            for value in node.inputs
        )
        if consistent:
            total = sum(row[k].total_s for row, k in zip(prices, positions, strict=True))
            total += sum(prices_of_change(change) for change in conversions_of(problem, chosen))
            best = min(best, total)
    return best


@settings(max_examples=12, deadline=None)
@given(
    kind=st.sampled_from([UnitKind.BLOCK, UnitKind.PROLOGUE, UnitKind.EPILOGUE]),
    size=st.sampled_from([1, 4, 16]),
    bandwidth=st.floats(0.01, 100),
    latency=st.floats(0.01, 100),
    compute=st.floats(0.01, 100),
)
def test_the_objective_equals_enumeration(gpt, kind, size, bandwidth, latency, compute):
    graph = gpt.at(size)
    problem = sharding_problem(
        graph, fold_unit(graph, unit_of(graph, kind)), over=SplitAxis("tp", 2), sequence_dim=None
    )
    rates = rank_of(tp=2, bandwidth=bandwidth, latency=latency, compute=compute)
    solution = solve_sharding(problem, rates)
    prices = price_strategies(problem, rates)
    least = enumerated_s(problem, prices, lambda change: sum(conversion_s(problem, *change, rates)))
    assert solution.objective_s == pytest.approx(least, rel=1e-6)


def styles(solution):
    prefix = f"{solution.problem.unit.name}."
    return {
        node.module.removeprefix(prefix): (
            strategy.style,
            max((each.fused for each in strategy.split), default=1),
        )
        for node, strategy in zip(solution.problem.folded.nodes, solution.chosen, strict=True)
        if node.kind is NodeKind.MODULE
    }


@pytest.mark.parametrize("sequence_dim", [None, 1])
def test_a_transformer_block_gets_columns_then_rows(big_gpt, sequence_dim):
    graph = big_gpt.at(4)
    unit = unit_of(graph, UnitKind.BLOCK)
    problem = sharding_problem(
        graph, fold_unit(graph, unit), over=SplitAxis("tp", 4), sequence_dim=sequence_dim
    )
    assert is_solvable(problem)
    solution = solve_sharding(problem, rank_of(tp=4))
    found = styles(solution)
    assert found["attn.c_attn"] == ("column", 3)
    assert found["attn.c_proj"] == ("row", 1)
    assert found["mlp.c_fc"] == ("column", 1)
    assert found["mlp.c_proj"] == ("row", 1)
    norm = ("on_part", 1) if sequence_dim == 1 else ("replicate", 1)
    assert found["ln_1"] == norm
    assert found["ln_2"] == norm
    # Two changes of layout: the inputs of attention and MLP, each shared by its projections.
    assert [q for _, _, q in solution.conversions] == [REPLICATE_PARTIAL_GRAD] * 2


def test_query_key_and_value_share_one_collective(llama):
    # Enough samples that halving the heads halves the attention kernel's time.
    graph = llama.at(128)
    unit = unit_of(graph, UnitKind.BLOCK)
    problem = sharding_problem(
        graph, fold_unit(graph, unit), over=SplitAxis("tp", 2), sequence_dim=None
    )
    solution = solve_sharding(problem, rank_of(tp=2, compute=1e-4))
    assert styles(solution)["attention.wq"] == ("column", 1)
    assert styles(solution)["attention.wk"] == ("column", 1)
    assert len(solution.conversions) == 2


def test_the_head_is_split_over_the_vocabulary(big_gpt):
    graph = big_gpt.at(4)
    unit = unit_of(graph, UnitKind.EPILOGUE)
    problem = sharding_problem(
        graph, fold_unit(graph, unit), over=SplitAxis("tp", 4), sequence_dim=None, split_tables=True
    )
    solution = solve_sharding(problem, rank_of(tp=4))
    heads = [s for s in solution.chosen if s.style == "column"]
    assert len(heads) == 1
    assert all(layout.is_shard for layout in heads[0].outputs.values())


def test_slow_links_leave_everything_whole(gpt):
    graph = gpt.at(1)
    unit = unit_of(graph, UnitKind.BLOCK)
    problem = sharding_problem(
        graph, fold_unit(graph, unit), over=SplitAxis("tp", 2), sequence_dim=None
    )
    solution = solve_sharding(problem, rank_of(tp=2, bandwidth=1e-4))
    assert {style for style, _ in styles(solution).values()} == {"replicate"}


def test_heads_that_do_not_divide_keep_attention_whole(llama):
    graph = llama.at(2)
    unit = unit_of(graph, UnitKind.BLOCK)
    problem = sharding_problem(
        graph, fold_unit(graph, unit), over=SplitAxis("tp", 8), sequence_dim=None
    )
    solution = solve_sharding(problem, rank_of(tp=8, compute=1e-4))
    attention = [
        strategy
        for node, strategy in zip(problem.folded.nodes, solution.chosen, strict=True)
        if node.kind is NodeKind.REGION and any(
            graph.nodes[op].name.startswith("_scaled_dot_product") for op in node.ops
        )
    ]  # fmt: skip
    assert not any(layout.is_shard for s in attention for layout in s.inputs.values())
