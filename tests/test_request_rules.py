from dataclasses import replace

import pytest
from plan_factory import make_plan

from planner.errors import RequestError
from planner.hardware.profiles import load_cluster
from planner.request import PlanRequest
from planner.request_rules import (
    check_request,
    estimated_layout,
    fix_warnings,
    parse_fix,
    resolve_dtype,
)
from planner.strategy.mesh import ParallelDegrees

REQUEST = PlanRequest(model="model.py", gpus=8)


def request_with(*settings, **fields):
    return replace(REQUEST, fixed=tuple(parse_fix(settings).items()), **fields)


def refusal(*settings, **fields):
    with pytest.raises(RequestError) as caught:
        check_request(request_with(*settings, **fields))
    assert caught.value.hint, "an error says what would work"
    return str(caught.value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("pp", "an order has two axes or more"),
        ("pp-tp-pp", "each of them once"),
        ("pp-dq", "there is no such choice"),
    ],
)
def test_an_order_names_axes_once(value, words):
    assert words in refusal(f"mesh_order={value}")


def test_a_sound_request_passes_unchanged():
    assert check_request(REQUEST) == REQUEST


def test_fixed_values_get_one_spelling_and_one_order():
    request = check_request(request_with("tp=02", "dp_shard=4", "sequence_parallel=True"))
    assert request.fixed == (("dp_shard", "4"), ("tp", "2"), ("sequence_parallel", "true"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"gpus": 0}, "--gpus 0: it must be at least 1"),
        ({"gpus": -8}, "--gpus -8"),
        ({"gpus": 10**11}, "--gpus 100,000,000,000: plans are made for 1,048,576 at most"),
        ({"gpus_per_node": 0}, "--gpus-per-node 0"),
        ({"global_batch_size": 0}, "--global-batch-size 0"),
        ({"seq_len": 0}, "--seq-len 0"),
        ({"top": 0}, "--top 0"),
        ({"time_limit_s": 0.0}, "--time-limit 0"),
        ({"time_limit_s": float("nan")}, "--time-limit nan"),
        ({"dtype": "bf16"}, "Did you mean bfloat16?"),
        ({"dtype": "float16"}, "Choices: bfloat16, float32, float64"),
    ],
)
def test_impossible_values_are_refused(fields, words):
    assert words in refusal(**fields)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["tp"], "has the form NAME=VALUE"),
        (["=2"], "has the form NAME=VALUE"),
        (["tp="], "has the form NAME=VALUE"),
        (["tp=2", "tp=4"], "contradict each other"),
        (["tpp=2"], "Did you mean tp?"),
        (["data=2"], "nothing is named data"),
        (["tp=x"], "tp is a whole number"),
        (["tp=0"], "at least 1"),
        (["tp=2.5"], "tp is a whole number"),
        (["tp=-2"], "tp is a whole number"),
        (["tp=3"], "What divides 8: 1, 2, 4, 8."),
        (["tp=4", "pp=4"], "their product 16 does not divide 8"),
        (["tp=2", "pp=2", "cp=1", "dp_shard=1", "dp_replicate=1"], "4 GPUs would idle"),
        (["ep=3"], "8 % 3 = 2"),
        (["ep=4", "dp_shard=2", "tp=1", "cp=1"], "from dp_shard, cp and tp, and 2 % 4"),
        (["ep=8", "dp_shard=2", "tp=2", "cp=1"], "from dp_shard, cp and tp, and 4 % 8"),
        (["ep=8", "dp_shard=1", "cp=2", "tp=2"], "from dp_shard, cp and tp, and 4 % 8"),
        (["schedule=1f1b"], "Did you mean 1F1B?"),
        (["schedule=ZB-1p"], "Choices: GPipe, 1F1B, Interleaved1F1B, InterleavedZeroBubble"),
        (["schedule=ZBVZeroBubble", "virtual_stages=4"], "two stages per rank"),
        (["activation_checkpointing=all"], "Choices: none, selective, full"),
        (["reshard_after_forward=maybe"], "Choices: true, false"),
        (["microbatch_size=0"], "microbatch_size is a whole number"),
        (["schedule=1F1B", "pp=1"], "there is no schedule"),
        (["schedule=GPipe", "virtual_stages=2"], "one stage per rank"),
        (["schedule=Interleaved1F1B", "virtual_stages=1"], "two or more stages"),
    ],
)
def test_impossible_settings_are_refused(settings, words):
    assert words in refusal(*settings)


def test_frameworks_are_priced_without_context_parallelism():
    asked = replace(request_with("cp=2"), framework="nanotron")
    with pytest.raises(RequestError, match="cp=2 with --framework"):
        check_request(asked)
    assert check_request(replace(request_with("cp=1"), framework="nanotron")).fixed == (
        ("cp", "1"),
    )


def test_the_same_setting_twice_is_harmless():
    assert parse_fix(["tp=2", "tp=2"]) == {"tp": "2"}
    assert parse_fix(["tp=2,pp=4", "mesh_order=tp-pp"]) == {
        "tp": "2", "pp": "4", "mesh_order": "tp-pp",
    }  # fmt: skip


@pytest.mark.parametrize("gpus", [4, 8, 16])
def test_nodes_may_be_filled_in_part_or_as_a_whole(gpus):
    assert check_request(replace(REQUEST, gpus=gpus, gpus_per_node=8)).gpus == gpus


def test_settings_without_effect_are_named():
    request = check_request(
        request_with("reshard_after_forward=true", "schedule=1F1B", "sequence_parallel=true")
    )
    plan = make_plan(ParallelDegrees(dp_replicate=4, tp=2))
    assert fix_warnings(request, plan) == (
        "--fix reshard_after_forward=true has no effect: the plan has dp_shard=1",
        "--fix schedule=1F1B has no effect: the plan has pp=1",
    )
    shared = check_request(request_with("virtual_stages=2"))
    assert fix_warnings(shared, plan) == (
        "--fix virtual_stages=2 has no effect: the plan has pp=1",
    )
    assert fix_warnings(REQUEST, plan) == ()


@pytest.mark.parametrize(
    ("order", "warnings"),
    [
        ("tp-pp", ("--fix mesh_order=tp-pp has no effect: the plan has pp=1",)),
        (
            "pp-dp_shard",
            ("--fix mesh_order=pp-dp_shard has no effect: the plan has pp=1, dp_shard=1",),
        ),
        ("tp-dp_replicate", ()),
    ],
)
def test_an_order_of_axes_that_have_one_rank_has_no_effect(order, warnings):
    request = check_request(request_with(f"mesh_order={order}"))
    plan = make_plan(ParallelDegrees(dp_replicate=4, tp=2))
    assert fix_warnings(request, plan) == warnings


@pytest.mark.parametrize(("cluster", "dtype"), [("h100-sxm", "bfloat16"), ("v100-sxm", "float32")])
def test_the_faster_dtype_of_the_device_is_the_default(cluster, dtype):
    device = load_cluster(cluster, gpus=8).device
    assert resolve_dtype(REQUEST, device) == dtype


def test_a_dtype_that_the_device_has_not_is_refused():
    device = load_cluster("v100-sxm", gpus=8).device
    with pytest.raises(RequestError, match="--dtype bfloat16 on v100") as caught:
        resolve_dtype(replace(REQUEST, dtype="bfloat16"), device)
    assert "float32" in caught.value.hint


@pytest.mark.parametrize(
    ("settings", "degrees"),
    [
        ([], {"dp_replicate": "1", "dp_shard": "8", "tp": "1", "pp": "1"}),
        (["tp=2"], {"dp_replicate": "1", "dp_shard": "4", "tp": "2", "pp": "1"}),
        (["ep=2"], {"dp_replicate": "1", "dp_shard": "8", "tp": "1", "pp": "1", "ep": "2"}),
        (["dp_shard=4"], {"dp_replicate": "2", "dp_shard": "4", "tp": "1", "pp": "1"}),
        (
            ["dp_replicate=2", "pp=4"],
            {"dp_replicate": "2", "dp_shard": "1", "tp": "1", "pp": "4"},
        ),
    ],
)
def test_an_estimate_gives_the_devices_left_over_to_data_parallelism(settings, degrees):
    found = estimated_layout(check_request(request_with(*settings)))
    assert found == {"cp": "1", "ep": "1"} | degrees


def test_an_estimate_that_leaves_devices_idle_is_refused():
    request = check_request(request_with("dp_shard=2", "dp_replicate=2"))
    with pytest.raises(RequestError, match="multiply to 4") as caught:
        estimated_layout(request)
    assert "--gpus 4" in caught.value.hint
