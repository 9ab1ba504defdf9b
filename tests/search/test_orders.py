"""Orders of the mesh that are tried, refused and told of."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import permutations
from unittest.mock import patch

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from instances import clusters, configurations, enumerated_s, models, search_of
from searches import search_for

from planner.hardware.profiles import load_cluster
from planner.search.decide import Decision
from planner.search.first_choices import FirstChoices
from planner.search.orders import MeshOrders
from planner.search.visits import NEAR_SHARE
from planner.strategy.mesh import ParallelDegrees
from planner.strategy.placement import mesh_orders
from planner.vocabulary import MESH_ORDER

TWO_NODES = load_cluster("h100-sxm", gpus=16)
SPLIT = ParallelDegrees(dp_shard=4, tp=4)
LAID_OUT = "modules laid out as on the innermost links"


def in_every_order(configuration):
    """All orders of the axes that have several ranks, whatever links they cross."""
    used = [axis for axis in MESH_ORDER if getattr(configuration.degrees, axis) > 1]
    for permutation in permutations(used):
        left = iter(permutation)
        order = tuple(next(left) if axis in used else axis for axis in MESH_ORDER)
        yield replace(configuration, mesh_order=order)


@settings(max_examples=60)
@given(models(), clusters(), st.booleans(), st.data())
def test_the_best_order_is_found_and_proven(model, cluster, has_first_choices, data):
    """Against all permutations, also of clusters that the mesh does not fill evenly.

    Without first choices of interleaved stages nothing is near to the best before the proof.
    """
    sampled = [
        each for each in configurations(model) if has_first_choices or each.virtual_stages > 1
    ]
    assume(sampled)
    configuration = data.draw(st.sampled_from(sampled))
    best_s = min(enumerated_s(search_of(model, c, cluster)) for c in in_every_order(configuration))

    def others(search):
        orders = mesh_orders(cluster, search.configuration.degrees)
        placed = [replace(configuration, mesh_order=order) for order in orders[1:]]
        return [search_of(model, each, cluster) for each in placed]

    usual = search_of(model, configuration, cluster)
    decision = Decision([usual], top=2, time_limit_s=None, others=others)
    blind = patch.object(FirstChoices, "first", lambda *_: None)
    with nullcontext() if has_first_choices else blind:
        report = decision.decide()
    if best_s == float("inf"):
        assert not decision.incumbents.solved
        return
    assert report.status == "optimal"
    assert report.objective_s == pytest.approx(best_s, rel=1e-6)
    assert not list(decision.visits.rejections())


def test_orders_are_those_that_differ_in_links_the_usual_first():
    found = MeshOrders(TWO_NODES, ()).of(SPLIT)
    assert found[0] == MESH_ORDER
    assert [order[-1] for order in found] == ["tp", "dp_shard"]


def test_a_fixed_order_is_kept():
    found = MeshOrders(TWO_NODES, ("tp", "dp_shard")).of(SPLIT)
    assert [order.index("tp") < order.index("dp_shard") for order in found] == [True]


def test_on_one_link_there_is_one_order():
    orders = MeshOrders(load_cluster("h100-sxm", gpus=8), ())
    assert orders.of(ParallelDegrees(dp_shard=4, tp=2)) == (MESH_ORDER,)
    assert orders.limits([ParallelDegrees(dp_shard=4, tp=2)], 0.05) == ()


@pytest.mark.parametrize(
    ("kept", "degrees", "words"),
    [
        ((), ParallelDegrees(dp_shard=4, pp=4), "beside the usual for layouts within 5% of the"),
        ((), SPLIT, LAID_OUT),
        (("dp_shard", "pp"), ParallelDegrees(dp_shard=4, pp=2, tp=2), "with dp_shard around pp"),
        ((), ParallelDegrees(dp_replicate=2, pp=2, tp=4, ep=4), "ep with tp and cp innermost"),
    ],
)
def test_limits_say_what_was_searched(kept, degrees, words):
    (limit,) = MeshOrders(TWO_NODES, kept).limits([degrees], NEAR_SHARE)
    assert words in limit


@pytest.mark.parametrize("axes", [("tp",), ("cp",), ("cp", "tp")])
@pytest.mark.parametrize("shards", [(), ("dp_shard",)])
def test_an_order_against_ep_with_tp_and_cp_is_refused_with_what_works(shards, axes):
    kept = (*shards, "pp", *axes) if shards else (*axes, "pp")
    works = "-".join(("pp", *shards, *axes))
    degrees = ParallelDegrees(dp_shard=2, pp=2, dp_replicate=2, ep=4, **dict.fromkeys(axes, 2))
    rule = MeshOrders(TWO_NODES, kept).broken_rule(degrees)
    ranks = " and ".join(f"{axis} 2" for axis in axes)
    assert f"mesh_order={'-'.join(kept)} with ep 4 and {ranks}" in rule.detail
    assert f"mesh_order can be {works}, or ep 1" in rule.detail
    assert MeshOrders(TWO_NODES, tuple(works.split("-"))).broken_rule(degrees) is None
    assert MeshOrders(TWO_NODES, kept).broken_rule(replace(degrees, ep=1)) is None


def test_the_search_of_one_layout_equals_that_of_every_fixed_order(gpt):
    """Small messages: the traffic of tp between nodes costs less than that of dp_shard."""
    fixed = {"dp_replicate": 1, "dp_shard": 8, "tp": 2}
    best = search_for(gpt, TWO_NODES, **fixed).best
    found = [
        search_for(gpt, TWO_NODES, **fixed, mesh_order=order).best
        for order in permutations(("dp_shard", "tp"))
    ]
    assert best.costs.step_time_s == pytest.approx(min(plan.costs.step_time_s for plan in found))
    assert best.mesh_order[-1] == "dp_shard"


@pytest.mark.parametrize(("name", "batch"), [("h100-sxm", 64), ("a10g", 64)])
def test_the_best_order_hangs_on_no_number_of_layouts_to_show(llama, name, batch):
    """Layouts within 5% of the fastest are tried in other orders, shown or not."""
    cluster = load_cluster(name, gpus=32)
    found = [search_for(llama, cluster, batch=batch, top=top) for top in (1, 10)]
    least_s = min(outcome.solver.objective_s for outcome in found)
    for outcome in found:
        assert outcome.solver.objective_s == pytest.approx(least_s, rel=1e-9)
        assert any("orders of the mesh" in limit for limit in outcome.solver.limits)
    degrees = found[1].best.degrees
    fixed = {axis: getattr(degrees, axis) for axis in ("dp_replicate", "dp_shard", "tp", "pp")}
    alone = search_for(llama, cluster, batch=batch, **fixed)
    assert alone.solver.objective_s == pytest.approx(least_s, rel=1e-9)


def test_a_search_tells_of_its_orders(big_gpt):
    outcome = search_for(big_gpt, TWO_NODES, tp=2, pp=2, mesh_order=("dp_shard", "pp"))
    assert any("with dp_shard around pp" in limit for limit in outcome.solver.limits)
    plans = [plan for plan in outcome.candidates if plan.degrees.dp_shard > 1]
    assert plans
    for plan in plans:
        assert plan.mesh_order.index("dp_shard") < plan.mesh_order.index("pp")
