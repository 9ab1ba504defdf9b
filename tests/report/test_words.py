from dataclasses import replace

import pytest
from plan_factory import make_cluster, make_costs, make_plan

from planner.plan.types import SolverReport
from planner.report.words import (
    detail_words,
    difference_words,
    explanation,
    layout_words,
    percent_words,
    policy_words,
    solver_words,
    unit_words,
)
from planner.strategy.mesh import ParallelDegrees


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        (ParallelDegrees(dp_shard=4, tp=2), "dp_shard 4, tp 2"),
        (ParallelDegrees(dp_shard=4, pp=2), "dp_shard 4, pp 2, 1F1B"),
        (ParallelDegrees(dp_replicate=2, tp=10), "dp_replicate 2, tp 10"),
        (ParallelDegrees(), "one device"),
    ],
)
def test_a_layout_is_named_by_what_it_splits(degrees, words):
    plan = replace(make_plan(), degrees=degrees, schedule="1F1B")
    assert layout_words(plan) == words


def test_details_name_microbatch_and_recomputation():
    assert detail_words(make_plan(policy="full")) == "microbatch 2 x 8, recompute full"


def test_a_difference_names_the_components_that_lose():
    best = make_plan()
    plan = make_plan(costs=make_costs(recompute_s=0.095, bubble_s=0.020, tp_comm_s=0.0))
    assert difference_words(plan, best) == "95 ms more recomputation, 20 ms more pipeline bubble"
    assert percent_words(plan, best) == "+20.4%"


def test_a_difference_of_nothing_is_said_so():
    assert difference_words(make_plan(), make_plan()) == "as fast"


def test_a_faster_plan_names_what_it_saves():
    best = make_plan(costs=make_costs(recompute_s=0.1))
    assert difference_words(make_plan(), best) == "100 ms less recomputation"


def test_an_explanation_covers_each_axis_in_use():
    plan = make_plan(ParallelDegrees(dp_shard=2, tp=2, pp=2), policy="selective")
    words = dict(explanation(plan, make_cluster()))
    assert list(words) == ["data", "tensor", "pipeline", "recompute"]
    assert "ZeRO-3" in words["data"]
    assert "sequence parallel" in words["tensor"]
    assert "1F1B" in words["pipeline"]
    assert "selective" in words["recompute"]
    assert list(dict(explanation(make_plan(ParallelDegrees()), make_cluster()))) == [
        "data",
        "recompute",
    ]


def test_the_links_of_each_axis_are_said_where_there_are_several():
    plan = replace(
        make_plan(ParallelDegrees(dp_shard=8, pp=2, tp=2)),
        mesh_order=("dp_replicate", "dp_shard", "cp", "pp", "tp"),
    )
    assert dict(explanation(plan, make_cluster(32)))["mesh"] == (
        "dp_shard around pp around tp: tp, pp over NVLink 4; dp_shard over NVLink 4 and EFA 400 "
        "Gbit/s"
    )


def test_inputs_in_host_memory_are_explained_where_some_lie_there():
    on_host = {"activation_offload": True, "host_bytes_by_rank": (3 * 2**30,)}
    full, none = (
        dict(explanation(replace(make_plan(policy=policy), **on_host), make_cluster()))["inputs"]
        for policy in ("full", "none")
    )
    assert "copied to host memory, up to 3.0 GiB" in full
    assert "no effect" in none


def test_kept_parameters_are_zero_2():
    words = dict(explanation(make_plan(reshard_after_forward=False), make_cluster()))
    assert "ZeRO-2" in words["data"]


@pytest.mark.parametrize(
    ("units", "words"),
    [
        (("prologue", "h.0", "h.1", "h.2"), "prologue, h.0 - h.2"),
        (("h.3", "h.4", "epilogue"), "h.3, h.4, epilogue"),
        (("model",), "model"),
    ],
)
def test_units_are_named_briefly(units, words):
    assert unit_words(units) == words


def test_policies_of_a_stage_are_counted():
    units = ("prologue", "h.0", "h.1", "h.2")
    assert policy_words(("none", "full", "full", "none"), units) == "full x 2, none x 1"
    assert policy_words(("none", "full", "full", "full"), units) == "full"


def test_a_proof_that_is_not_closed_says_how_far():
    open_gap = SolverReport(status="time limit", objective_s=1.0, bound_s=0.9)
    assert "gap 10.00%" in solver_words(open_gap)
    assert "--time-limit" in solver_words(open_gap)
    closed = SolverReport(status="optimal", objective_s=1.0, bound_s=1.0)
    assert solver_words(closed).startswith("optimal")
