import json
from dataclasses import replace

from plan_factory import make_outcome, make_record

from planner.errors import InfeasiblePlanError
from planner.plan.serialize import plan_from_document
from planner.report.document import infeasible_json, plan_json


def test_equal_runs_give_equal_bytes():
    assert plan_json(make_record()) == plan_json(make_record())


def test_the_contract_of_plan_json():
    document = json.loads(plan_json(make_record(fixed=(("tp", "2"),))))
    assert document["schema_version"] == 3
    assert document["request"]["fixed"] == {"tp": "2"}
    assert document["request"]["global_batch_size"] is None
    assert document["cluster"]["name"] == "h100-sxm"
    assert document["cluster"]["profile_hash"]
    assert document["cluster"]["device"]["memory_bytes"] > 2**36
    assert document["solver"].keys() == {"status", "objective_s", "bound_s", "limits", "gap"}
    for name in ("best", "runner_up", "rule_of_thumb"):
        plan = document[name]
        assert {
            "degrees",
            "schedule",
            "microbatch_size",
            "num_microbatches",
            "activation_checkpointing",
            "stages",
            "costs",
        } <= plan.keys()
        assert plan["costs"]["step_time_s"] > 0
        assert plan["stages"][0]["units"][0] == "prologue"
        assert plan["stages"][0]["memory"]["activations_bytes"] > 0
        assert plan["figures"]["tokens_per_s_per_gpu"] > 0


def test_the_plans_in_it_are_the_plans():
    record = make_record()
    document = json.loads(plan_json(record))
    assert plan_from_document(document["best"]) == record.outcome.best
    assert plan_from_document(document["runner_up"]) == record.outcome.runner_up
    assert plan_from_document(document["rule_of_thumb"]) == record.outcome.rule_of_thumb


def test_what_is_missing_is_null():
    outcome = make_outcome()
    alone = replace(outcome, candidates=(outcome.best,), rule_of_thumb=None, rejections=())
    document = json.loads(plan_json(make_record(alone)))
    assert document["runner_up"] is None
    assert document["rule_of_thumb"] is None
    assert document["rejected_by_rule"] == {}


def test_refusals_are_counted_by_rule_with_each_reason_once():
    document = json.loads(plan_json(make_record()))
    assert document["num_layouts"] == 8
    heads = document["rejected_by_rule"]["kv_heads % tp"]
    assert heads["count"] == 2
    assert heads["details"] == ["kv_heads 4 is not divisible by tp 8; tp 1, 2, 4 would work"]
    assert len(document["rejected_by_rule"]["memory"]["details"]) == 3


def test_an_infeasible_request_says_what_is_missing():
    error = InfeasiblePlanError(
        "llama_405b on 8 GPUs: short by 3 bytes on stage 1",
        hint="--gpus 16 would fit",
        shortfall_bytes_by_stage={1: 3, 0: 2},
    )
    document = json.loads(infeasible_json(error))
    assert document["best"] is None
    assert document["error"]["shortfall_bytes_by_stage"] == {"0": 2, "1": 3}
    assert document["error"]["message"] == "llama_405b on 8 GPUs: short by 3 bytes on stage 1"
    assert document["error"]["hint"] == "--gpus 16 would fit"
