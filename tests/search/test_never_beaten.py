"""No legal estimate is faster than the plan: every configuration decided alone, none pruned."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from searches import request_for, search_for

from planner.framework.script import SCRIPT, framework_on_cluster
from planner.graph.loading.load import load_model
from planner.graph.sizes.family import trace_family
from planner.search.decide import Decision
from planner.search.space import LayoutSpace

CLUSTERS = {
    "h100-sxm": (8, 1.0),
    "l40s": (8, 1.0),
    "a10g": (8, 1.0),
    "a100-80gb-sxm": (4, 0.25),
}
"""GPUs, and share of the memory, so that recomputation and stage cuts matter."""
SHARED_CORES = {"cpu": (4, 1.0)}
"""The same of ranks that share cores."""


def machine(name):
    gpus, share = (CLUSTERS | SHARED_CORES)[name]
    _, cluster = framework_on_cluster(SCRIPT, name, gpus=gpus)
    device = replace(cluster.device, memory_bytes=int(cluster.device.memory_bytes * share))
    return replace(cluster, device=device)


def check(graphs, cluster, batch):
    outcome = search_for(graphs, cluster, batch=batch)
    best_s = outcome.best.costs.step_time_s
    assert best_s == pytest.approx(outcome.solver.objective_s)
    space = LayoutSpace(graphs, cluster, request_for(cluster, batch=batch))
    priced = 0
    for configuration in space.legal()[0]:
        for search in space.searches(configuration):
            if search.bound_s > 1.5 * best_s:
                continue  # far off, by a bound that other tests hold to enumeration
            alone = Decision([search], top=1, time_limit_s=None)
            alone.decide()
            if alone.incumbents.solved:
                priced += 1
                assert alone.incumbents.nth_s(1) >= best_s * (1 - 1e-6), configuration
    assert priced > 3


@pytest.mark.parametrize(
    ("model", "cluster"), [("gpt", "h100-sxm"), ("llama", "a10g"), ("gpt", "cpu")]
)
def test_no_estimate_is_faster_than_the_plan(model, cluster, request):
    check(request.getfixturevalue(model), machine(cluster), batch=32)


def test_no_estimate_is_faster_where_samples_are_few(llama):
    """Fewer samples than devices: cp is tried unasked, and beaten by nothing either."""
    cluster = machine("h100-sxm")
    space = LayoutSpace(llama, cluster, request_for(cluster, batch=4))
    assert {each.degrees.cp for each in space.legal()[0]} >= {1, 2, 4}
    check(llama, cluster, batch=4)


@pytest.mark.parametrize("model", ["routed_experts", "routed_attention"])
def test_no_estimate_is_faster_where_ranks_may_share_experts(model):
    """ep is tried unasked for a mixture of experts, and no degree of it is better than said.

    With tp as well, whose ranks are then among its own.
    """
    file = Path(__file__).parents[1] / "run" / f"{model}.py"
    graphs = trace_family(load_model(str(file)), dtype="bfloat16")
    cluster = machine("a10g")
    space = LayoutSpace(graphs, cluster, request_for(cluster, batch=16))
    tried = {(each.degrees.tp, each.degrees.ep) for each in space.legal()[0]}
    assert {ep for tp, ep in tried if tp == 1} == {1, 2, 4, 8}
    assert {ep for tp, ep in tried if tp == 2} == {1, 2, 4, 8}
    check(graphs, cluster, batch=16)


def test_no_estimate_is_faster_where_ranks_of_contexts_share_experts():
    file = Path(__file__).parents[1] / "run" / "routed_attention.py"
    graphs = trace_family(load_model(str(file)), dtype="bfloat16")
    cluster = machine("a10g")
    space = LayoutSpace(graphs, cluster, request_for(cluster, batch=4))
    tried = {(each.degrees.cp, each.degrees.ep) for each in space.legal()[0]}
    assert tried >= {(2, 1), (2, 2), (2, 4), (4, 4)}
    check(graphs, cluster, batch=4)


@pytest.mark.bench
@pytest.mark.parametrize(
    ("model", "cluster", "batch"),
    list(product(("gpt", "llama", "mlp", "big_gpt"), CLUSTERS, (16, 128))),
)
def test_no_estimate_is_faster_than_the_plan_of_any_request(model, cluster, batch, request):
    check(request.getfixturevalue(model), machine(cluster), batch=batch)
