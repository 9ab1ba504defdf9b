"""Sweeps against single plans: each point is what ``planner.plan`` finds."""

import json
from pathlib import Path

import pandas as pd
import pytest

import planner
from planner.errors import ModelError, ProfileError, RequestError
from planner.planning import TracedModel
from planner.questions import sweep as sweeping
from planner.questions.sweep_table import SWEEP_COLUMNS

GPT = Path(__file__).parents[2] / "examples" / "gpt.py"
LLAMA = f"{GPT.parent / 'llama.py'}:llama_tiny"
FIX = {"tp": 2, "virtual_stages": 1}
PRICES = {"h100-sxm": 2.0, "a100-80gb-sxm": 1.0}


@pytest.fixture(scope="module")
def swept():
    return planner.sweep(
        LLAMA,
        gpus="2..4",
        cluster=["h100-sxm", "a100-80gb-sxm"],
        seq_len=[32, 64],
        fix=FIX,
        price_per_gpu_hour=PRICES,
        tokens=1e9,
    )


def test_every_point_is_a_single_plan(swept):
    for point in swept.points:
        asked = point.request
        single = planner.plan(
            LLAMA,
            gpus=asked.gpus,
            cluster=asked.cluster,
            seq_len=asked.seq_len,
            global_batch_size=asked.global_batch_size,
            fix=FIX,
        )
        assert point.plan == single.best
        assert point.record.outcome.solver == single.outcome.solver


def test_points_are_all_combinations_and_share_the_batch(swept):
    asked = [point.request for point in swept.points]
    assert len(asked) == 2 * 2 * 2
    assert {(each.cluster, each.seq_len, each.gpus) for each in asked} == {
        (cluster, length, gpus) for cluster in PRICES for length in (32, 64) for gpus in (2, 4)
    }
    assert {each.global_batch_size for each in asked} == {32}


def test_figures_follow_from_the_plan(swept):
    for point in swept.points:
        plan = point.plan
        rate = plan.global_batch_size * point.request.seq_len / plan.costs.step_time_s
        assert point.tokens_per_s == pytest.approx(rate)
        days = 1e9 / rate / 86400
        assert point.duration_s / 86400 == pytest.approx(days)
        hours = 24 * days * point.request.gpus
        assert point.cost == pytest.approx(hours * PRICES[point.request.cluster])
        assert point.cost_per_token == pytest.approx(point.cost / 1e9)


def test_scaling_is_against_the_fewest_devices_of_the_same_series(swept):
    for point in swept.points:
        alike = [each for each in swept.points if each.series == point.series]
        first = next(each for each in alike if each.request.gpus == 2)
        expected = point.tokens_per_s / first.tokens_per_s / (point.request.gpus / 2)
        assert swept.sweep.scaling(point) == pytest.approx(expected)


def test_the_table_has_a_row_for_each_point(swept, tmp_path):
    assert tuple(swept.table.columns) == SWEEP_COLUMNS
    assert swept.table["pick"].sum() == 1
    file = tmp_path / "sweep.csv"
    swept.table.to_csv(file, index=False)
    read = pd.read_csv(file)
    assert list(read["step_time_s"]) == [point.plan.costs.step_time_s for point in swept.points]
    points = json.loads(swept.to_json())["points"]
    assert [point["cost"] for point in points] == list(swept.table["cost"])


def test_models_are_traced_once_for_each_length(monkeypatch):
    traced = []

    def of_request(request, model_object=None, *, progress=None):
        traced.append(request.seq_len)
        return TracedModel.of_request(request, model_object)

    class Counted:
        pass

    Counted.of_request = staticmethod(of_request)
    monkeypatch.setattr(sweeping, "TracedModel", Counted)
    planner.sweep(LLAMA, gpus=[1, 2], seq_len=[32, 64])
    assert traced == [32, 64]


def test_a_point_that_has_no_plan_says_why_beside_the_others():
    found = planner.sweep(str(GPT), gpus=[2, 3, 4], global_batch_size=4, fix={"dp_shard": 2})
    planned, refused, last = found.points
    assert planned.plan is not None
    assert last.plan is not None
    assert refused.plan is None
    with pytest.raises(RequestError) as single:
        planner.plan(str(GPT), gpus=3, global_batch_size=4, fix={"dp_shard": 2})
    assert str(refused.refusal) == str(single.value)
    assert list(found.table["status"]) == ["planned", "refused", "planned"]
    assert str(single.value).splitlines()[0] in found._repr_html_().replace("&#39;", "'")


def test_a_length_that_the_model_does_not_take_leaves_the_others():
    found = planner.sweep(LLAMA, gpus=[1, 2], seq_len=[64, 128])
    assert list(found.table["status"]) == ["planned", "planned", "refused", "refused"]
    assert "broadcast" in found.table["refusal"][2]


OBJECTIVES = {
    "step": lambda point: -point.tokens_per_s,
    "gpus": lambda point: point.request.gpus,
    "cost": lambda point: point.cost_per_token,
}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_pick_is_the_best_by_its_objective(swept, objective):
    request = sweeping.SweepRequest(points=(), objective=objective)
    chosen = sweeping.Sweep(request=request, points=swept.points).pick
    value = OBJECTIVES[objective]
    assert value(chosen) == min(map(value, swept.points))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("within", [0.05, 0.5, 0.99])
def test_what_is_given_up_of_the_objective_is_spent_on_the_other(swept, objective, within):
    request = sweeping.SweepRequest(points=(), objective=objective, within=within)
    chosen = sweeping.Sweep(request=request, points=swept.points).pick
    values = {
        "step": lambda point: 1 / point.tokens_per_s,
        "gpus": lambda point: point.request.gpus,
        "cost": lambda point: point.cost_per_token,
    }
    least = min(map(values[objective], swept.points))
    near = [p for p in swept.points if values[objective](p) <= (1 + within) * least]
    assert chosen in near
    if objective == "step":
        assert chosen.request.gpus == min(p.request.gpus for p in near)
    else:
        assert chosen.tokens_per_s == max(p.tokens_per_s for p in near)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"objective": "speed"}, RequestError, "--objective speed"),
        ({"within": 1.0}, RequestError, "--within 1.0"),
        ({"gpus": []}, RequestError, "--gpus"),
        ({"gpus": "8.."}, RequestError, "--gpus"),
        ({"cluster": "h900"}, ProfileError, "h900"),
        (
            {"cluster": list(PRICES), "price_per_gpu_hour": {"h100-sxm": 2}, "objective": "cost"},
            RequestError,
            "no price of a100-80gb-sxm",
        ),
        ({"model": "no_such_file.py"}, ModelError, "no_such_file.py"),
    ],
)
def test_bad_input_ends_the_sweep(changes, error, words):
    arguments = {"model": str(GPT), "gpus": [1, 2], **changes}
    with pytest.raises(error, match=words):
        planner.sweep(arguments.pop("model"), **arguments)


def test_ctrl_c_keeps_the_points_that_were_reached(monkeypatch):
    reached = []

    def record(self, request, **others):
        if reached:
            raise KeyboardInterrupt
        reached.append(request)
        return original(self, request, **others)

    original = TracedModel.record
    monkeypatch.setattr(TracedModel, "record", record)
    found = planner.sweep(str(GPT), gpus=[1, 2, 4])
    assert found.sweep.interrupted
    assert [point.request.gpus for point in found.points] == [1]
    assert "1 of 3 points" in found._repr_html_()


def test_a_picture_is_drawn(swept, tmp_path):
    pytest.importorskip("matplotlib")
    swept.plot(tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RequestError, match="exists"):
        swept.plot(tmp_path / "sweep.png")
