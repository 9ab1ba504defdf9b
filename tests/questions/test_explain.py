"""Explanations against fresh solves: of the changed machine, and of the restricted request."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import planner
from planner.errors import RequestError, VerificationError
from planner.questions.document import explanation_json, why_not_json
from planner.report.figures import cost_differences

EXAMPLES = Path(__file__).parents[2] / "examples"
PROFILES = Path(__file__).parents[2] / "profiles"
GPT = EXAMPLES / "gpt.py"

SIZES = {
    "vocab_size: int = 128": "vocab_size: int = 32000",
    "block_size: int = 64": "block_size: int = 1024",
    "n_embd: int = 64": "n_embd: int = 2048",
}
"""A GPT of 470 M parameters."""

REQUEST = {"gpus": 16, "global_batch_size": 64}
FIX = {"microbatch_size": 2, "virtual_stages": 1}

SMALL_GPU = 6.0
"""Memory of a device, GiB: so little that one more is used."""


def write_model(file, changes):
    text = GPT.read_text(encoding="utf-8")
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    file.write_text(text, encoding="utf-8")
    return str(file)


def write_cluster(folder, *, memory_gib=SMALL_GPU, inner=1.0, outer=1.0):
    """An H100 cluster with other memory and links."""
    device = (PROFILES / "devices" / "h100-sxm.toml").read_text(encoding="utf-8")
    device = re.sub(r"(?m)^(memory_gib = \{ value = )[\d.]+", rf"\g<1>{memory_gib}", device)
    cluster = (PROFILES / "clusters" / "h100-sxm.toml").read_text(encoding="utf-8")
    factors = iter([inner, outer])

    def scaled(match):
        return f"{match[1]}{float(match[2]) * next(factors)}"

    cluster = re.sub(
        r"(?m)^(peak_gb\w*_per_gpu_unidirectional = \{ value = )([\d.]+)", scaled, cluster
    )
    cluster = cluster.replace('device = "h100-sxm"', 'device = "device.toml"')
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "device.toml").write_text(device, encoding="utf-8")
    (folder / "cluster.toml").write_text(cluster, encoding="utf-8")
    return str(folder / "cluster.toml")


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explained")
    cluster = write_cluster(folder / "machine")
    model = write_model(folder / "model.py", SIZES)
    result = planner.plan(model, cluster=cluster, fix=FIX, **REQUEST)
    result.save(folder / "plan")
    return folder, result


@pytest.fixture(scope="module")
def explained(planned):
    return planner.explain(planned[0] / "plan")


def test_the_plan_is_found_again(planned, explained):
    best = explained.base.outcome.best
    assert replace(best, model=planned[1].best.model) == planned[1].best
    assert explained.base.outcome.solver == planned[1].outcome.solver
    assert not explained.notes


CHANGES = {
    "1 GiB more memory": {"memory_gib": SMALL_GPU + 1},
    "twice the bandwidth of NVLink 4": {"inner": 2.0},
    "twice the bandwidth of EFA 400 Gbit/s": {"outer": 2.0},
}


SETTINGS = ("compile=true", "float8=true", "cpu_offload=true", "activation_offload=true")
"""Tried where they are asked for alone."""


def test_what_more_buys_is_the_difference_of_two_plans(planned, explained, tmp_path):
    base_s = planned[1].best.costs.step_time_s
    found = {what_if.change: what_if for what_if in explained.what_ifs}
    assert list(found) == [*CHANGES, *SETTINGS]
    for words, change in CHANGES.items():
        cluster = write_cluster(tmp_path / words, **change)
        fresh = planner.plan(str(planned[0] / "model.py"), cluster=cluster, fix=FIX, **REQUEST).best
        step_s = found[words].plan.costs.step_time_s
        assert step_s == pytest.approx(fresh.costs.step_time_s, rel=1e-9)
        assert explained.gain(found[words]) == pytest.approx(1 - step_s / base_s)
    gains = [explained.gain(found[words]) for words in CHANGES]
    assert max(gains) > 0.001
    assert min(gains) > -1e-9


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_a_setting_buys_is_the_difference_of_two_plans(planned, explained, setting):
    result = planned[1]
    fix = {**FIX, setting.removesuffix("=true"): True}
    asked = result.record.request
    fresh = planner.plan(asked.model, cluster=asked.cluster, fix=fix, **REQUEST)
    (found,) = (each for each in explained.what_ifs if each.change == setting)
    assert replace(found.plan, model=fresh.best.model) == fresh.best


@pytest.mark.parametrize("restriction", ["tp=4", "pp=4,tp=2", "activation_checkpointing=full"])
def test_why_not_is_a_fresh_solve_under_the_restriction(planned, restriction):
    folder, result = planned
    answer = planner.explain_why_not(folder / "plan", restriction)
    fix = {**FIX, **dict(each.split("=") for each in restriction.split(","))}
    asked = result.record.request
    fresh = planner.plan(asked.model, cluster=asked.cluster, fix=fix, **REQUEST)
    assert replace(answer.best, model=fresh.best.model) == fresh.best
    assert answer.record.outcome.solver == fresh.outcome.solver
    assert answer.best.costs.step_time_s >= result.best.costs.step_time_s
    document = json.loads(why_not_json((answer,)))["why_not"][0]
    lost_s = sum(document["difference_s"].values())
    terms = {
        each.component: each.difference_s for each in cost_differences(fresh.best, result.best)
    }
    assert document["difference_s"] == terms
    expected_s = answer.best.costs.step_time_s - result.best.costs.step_time_s
    assert lost_s == pytest.approx(expected_s)


@pytest.mark.parametrize(
    ("restriction", "words"),
    [
        ("tp=3", "does not divide 16"),
        ("cp=16", "% cp 16"),
        ("dp_replicate=16,activation_checkpointing=none,cpu_offload=false", "short by"),
    ],
)
def test_what_breaks_a_rule_names_it(planned, restriction, words):
    answer = planner.explain_why_not(planned[0] / "plan", restriction)
    assert answer.best is None
    assert words in str(answer.refusal)


def test_a_restriction_takes_the_place_of_what_the_request_fixes(planned):
    answer = planner.explain_why_not(planned[0] / "plan", {"microbatch_size": 4})
    assert answer.best.microbatch_size == 4


def test_a_restriction_without_effect_says_so(planned):
    answer = planner.explain_why_not(planned[0] / "plan", "dp_shard=16,schedule=1F1B")
    assert answer.notes == ("--fix schedule=1F1B has no effect: the plan has pp=1",)
    assert not planner.explain_why_not(planned[0] / "plan", "pp=2,schedule=1F1B").notes


@pytest.mark.parametrize("restriction", ["tpp=8", "tp", "tp=2,tp=4", ""])
def test_what_is_no_setting_is_refused(planned, restriction):
    with pytest.raises(RequestError):
        planner.explain_why_not(planned[0] / "plan", restriction)


def test_another_profile_is_told(planned, tmp_path):
    folder = tmp_path / "copy"
    cluster = write_cluster(folder / "machine")
    planner.plan(str(GPT), gpus=2, cluster=cluster).save(folder / "plan")
    write_cluster(folder / "machine", inner=0.5)
    assert "other numbers" in planner.explain(folder / "plan").notes[0]


def test_an_estimate_is_told_apart_from_what_its_request_leads_to(tmp_path):
    fix = {"pp": 2, "microbatch_size": 1}
    result = planner.estimate(str(GPT), gpus=8, fix=fix)
    result.save(tmp_path / "plan")
    explained = planner.explain(tmp_path / "plan")
    assert explained.base.outcome.best.costs.step_time_s < result.best.costs.step_time_s
    assert "not what its request leads to" in explained.notes[0]


def test_a_model_that_has_changed_is_refused(tmp_path):
    planner.plan(str(GPT), gpus=2).save(tmp_path / "plan")
    write_model(tmp_path / "plan" / "model" / "gpt.py", {"n_layer: int = 8": "n_layer: int = 6"})
    with pytest.raises(VerificationError, match=r"Has .* changed"):
        planner.explain(tmp_path / "plan")


def test_the_json_has_all_plans(planned, explained):
    document = json.loads(explanation_json(explained))
    assert document["best"]["costs"] == json.loads(planned[1].to_json())["best"]["costs"]
    assert [each["change"] for each in document["what_ifs"]] == [*CHANGES, *SETTINGS]
