"""A share of each device's memory stays free: searched with, shown, stored and verified."""

import json
from dataclasses import replace

import pytest
from plan_factory import make_record

import planner
from planner.errors import InfeasiblePlanError, RequestError, VerificationError
from planner.plan.verify import verify_plan
from planner.report.figures import safer_choice
from planner.request_rules import LEAST_MARGIN, parse_margin

GPT = "examples/gpt.py"


@pytest.mark.parametrize(
    ("text", "share"), [("0.1", 0.1), ("10%", 0.1), ("0", 0.0), (" 5 %", 0.05)]
)
def test_a_margin_is_a_fraction_or_a_percentage(text, share):
    assert parse_margin(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["5", "100%", "-1%", "much", "nan", "5%%", "1"])
def test_what_is_no_share_is_refused(text):
    with pytest.raises(RequestError, match="--memory-margin"):
        parse_margin(text)


def test_the_default_is_stored_and_respected():
    result = planner.plan(GPT, gpus=2, cluster="cpu", dtype="float32")
    device = result.record.cluster.device
    assert device.margin_bytes == round(LEAST_MARGIN * device.memory_bytes)
    document = json.loads(result.to_json())
    assert document["cluster"]["device"]["margin_bytes"] == device.margin_bytes
    assert result.best.peak_memory_bytes <= device.capacity_bytes


def just_above(margin):
    """A layout, and a margin that it misses by little."""
    fix = {"dp_shard": 2, "activation_checkpointing": "none", "microbatch_size": 8}
    result = planner.estimate(GPT, gpus=2, cluster="cpu", dtype="float32", fix=fix)
    memory = result.record.cluster.device.memory_bytes
    return fix, 1 - result.best.peak_memory_bytes / memory + margin


def test_a_plan_keeps_the_margin_free():
    fix, margin = just_above(1e-3)
    request = {"gpus": 2, "cluster": "cpu", "dtype": "float32", "fix": fix}
    planner.plan(GPT, memory_margin=margin - 2e-3, **request)
    with pytest.raises(InfeasiblePlanError, match="kept free") as caught:
        planner.plan(GPT, memory_margin=margin, **request)
    assert "--memory-margin 0" in caught.value.hint


def test_an_estimate_says_that_it_fits_without_the_margin_alone():
    fix, margin = just_above(1e-3)
    result = planner.estimate(
        GPT, gpus=2, cluster="cpu", dtype="float32", fix=fix, memory_margin=margin
    )
    assert any("but not with" in warning for warning in result.warnings)
    assert result.record.cluster.device.margin_bytes == 0
    json.loads(result.to_json())


def test_a_plan_that_fills_the_margin_breaks_a_rule():
    record = make_record()
    best = record.outcome.best
    device = record.cluster.device
    tight = replace(device, margin_bytes=device.memory_bytes - best.peak_memory_bytes + 1)
    verify_plan(best, record.cluster)
    with pytest.raises(VerificationError, match="kept free"):
        verify_plan(best, replace(record.cluster, device=tight))


def test_the_safer_choice_is_within_the_error_and_holds_least():
    record = make_record()
    outcome, best = record.outcome, record.outcome.best

    def other(slower, memory):
        held = tuple(
            replace(each, activations_bytes=round(each.activations_bytes * memory))
            for each in best.memory_by_rank
        )
        longer = replace(
            best.costs, compute_s=best.costs.compute_s + slower * best.costs.step_time_s
        )
        return replace(best, memory_by_rank=held, costs=longer)

    lean, leanest = other(0.03, 0.5), other(0.2, 0.1)
    outcome = replace(outcome, candidates=(best, lean, leanest), rule_of_thumb=None)
    cluster = replace(record.cluster, step_time_errors=(), uncalibrated_error=0.05)
    assert safer_choice(outcome, cluster) == lean
    assert safer_choice(outcome, replace(cluster, uncalibrated_error=0.3)) == leanest
    assert safer_choice(outcome, replace(cluster, uncalibrated_error=0.01)) is None
    freed_bytes = best.peak_memory_bytes - lean.peak_memory_bytes
    for margin_bytes, found in ((freed_bytes - 1, lean), (freed_bytes, None)):
        device = replace(cluster.device, margin_bytes=margin_bytes)
        assert safer_choice(outcome, replace(cluster, device=device)) == found
    unknown = replace(cluster, uncalibrated_error=None)
    assert safer_choice(outcome, unknown) is None
