"""The fit against rows that the cost model made itself with known constants."""

from dataclasses import replace

import pytest
from run_tables import make_runs

from planner.cost.pattern_search import pattern_search
from planner.errors import RequestError
from planner.validation.fitting.fit import START, calibrate_runs, fit_constants, mean_error
from planner.validation.pricing.cases import case_of
from planner.validation.pricing.pricing import CasePricer
from planner.validation.reading.table import RunTable

MODELS = (
    {"layers": 8, "hidden": 512, "ffn": 2048, "heads": 8, "kv_heads": 8},
    {"layers": 8, "hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 32},
)
LAYOUTS = (
    {"num_gpus": 8, "tp": 1, "pp": 1, "dp": 8},
    {"num_gpus": 8, "tp": 4, "pp": 1, "dp": 2},
    {"num_gpus": 64, "tp": 1, "pp": 1, "dp": 64},
    {"num_gpus": 64, "tp": 8, "pp": 1, "dp": 8},
    {"num_gpus": 16, "tp": 1, "pp": 2, "dp": 8},
)
ROWS = [
    {**model, **layout, "seq_len": 2048, "vocab": 32768, "params_b": None,
     "micro_batch": size, "global_batch": 8 * size * layout["dp"],
     "step_time_s": None, "peak_mem_gib": None}
    for model in MODELS for layout in LAYOUTS for size in (1, 4)
]  # fmt: skip

TRUE = {
    "host_dispatch_us": 30.0,
    "sustained_fraction_of_peak": 0.5,
    "collective_host_us": 150.0,
    "gradient_overlap": 0.3,
    "step_us": 15000.0,
}


@pytest.fixture(scope="module")
def pricer():
    return CasePricer()


@pytest.fixture(scope="module")
def runs(pricer):
    """Rows whose time and memory are those of the model under ``TRUE`` and 2 GiB besides."""
    found = []
    for run in make_runs(*ROWS):
        price = pricer.price(case_of(run), TRUE | {"reserve_gib": 2.0})
        found.append(
            replace(
                run,
                step_time_s=price.costs.step_time_s,
                peak_mem_bytes=float(price.memory.total_bytes),
            )
        )
    return tuple(found)


def table(runs):
    return RunTable(name="own.csv", frame=None, runs=tuple(runs), problems=())


def test_known_constants_are_found_again(pricer, runs):
    cases = [case_of(run) for run in runs]
    start = {key: 1.6 * value for key, value in TRUE.items()}
    found = fit_constants(cases, start, pricer=pricer)
    assert mean_error(cases, found, pricer=pricer) < 0.01 < mean_error(cases, start, pricer=pricer)
    for key in ("host_dispatch_us", "sustained_fraction_of_peak", "collective_host_us"):
        assert found[key] == pytest.approx(TRUE[key], rel=0.05), key


def test_the_same_rows_give_the_same_constants(pricer, runs):
    cases = [case_of(run) for run in runs[:6]]
    assert fit_constants(cases, START, pricer=pricer) == fit_constants(
        list(cases), dict(START), pricer=CasePricer()
    )


def test_held_constants_and_zeros_keep_their_values(pricer, runs):
    cases = [case_of(run) for run in runs[:4]]
    start = {"step_us": 40000.0, "message_us": 0.0}
    others = {key: value for key, value in TRUE.items() if key not in start}
    found = fit_constants(cases, start, own={"nanotron": others}, pricer=pricer)
    assert found["message_us"] == 0
    assert found["step_us"] == pytest.approx(TRUE["step_us"], rel=0.05)


def test_far_rows_do_not_pull_the_constants(pricer, runs):
    cases = [case_of(run) for run in runs]
    slow = replace(runs[0], step_time_s=50 * runs[0].step_time_s)
    found = fit_constants([*cases, case_of(slow)], TRUE, pricer=pricer)
    assert found == pytest.approx(TRUE, rel=0.05)


class TestCalibration:
    def test_it_lowers_the_error_and_finds_the_reserve(self, runs):
        events = []
        calibration = calibrate_runs(table(runs), keep_going=False, progress=events.append)
        ((pair, fitted),) = calibration.fitted.items()
        assert pair == ("nanotron", "h100-sxm")
        assert fitted.num_rows == len(runs)
        assert fitted.error_after < min(0.05, fitted.error_before)
        assert fitted.values["reserve_gib"] == pytest.approx(2.0, abs=0.5)
        assert calibration.left_out == ()
        ended = [event.phase for event in events if event.elapsed_s is not None]
        assert ended == ["price", "fit nanotron on h100-sxm"]

    def test_rows_that_cannot_be_priced_are_listed(self, runs):
        refused = replace(runs[1], row=77, cp=2)
        calibration = calibrate_runs(table([*runs[:3], refused]), keep_going=False, progress=None)
        assert [each.row for each in calibration.left_out] == [77]
        assert "context parallelism" in calibration.left_out[0].reason
        assert calibration.fitted["nanotron", "h100-sxm"].num_rows == 3

    def test_unknown_names_are_an_error_or_listed(self, runs):
        mixed = table([*runs[:2], replace(runs[2], row=5, gpu="H1000")])
        with pytest.raises(RequestError, match=r"own.csv: 1 row is wrong\n  row 5 .* column gpu"):
            calibrate_runs(mixed, keep_going=False, progress=None)
        calibration = calibrate_runs(mixed, keep_going=True, progress=None)
        assert [each.column for each in calibration.left_out] == ["gpu"]

    def test_constants_at_their_bounds_are_told(self, runs):
        fast = [replace(run, step_time_s=run.step_time_s / 4) for run in runs]
        calibration = calibrate_runs(table(fast), keep_going=False, progress=None)
        (fitted,) = calibration.fitted.values()
        assert "sustained_fraction_of_peak" in fitted.at_bound
        assert any("(at its bound)" in line for line in calibration.lines())

    def test_rows_without_a_time_are_not_fitted_to(self, runs):
        untimed = [replace(run, step_time_s=None) for run in runs[:2]]
        assert calibrate_runs(table(untimed), keep_going=False, progress=None).fitted == {}


def test_single_moves_need_fewer_evaluations_than_pairs():
    calls = []

    def loss(values):
        calls.append(dict(values))
        return sum(
            abs(value - goal) for value, goal in zip(values.values(), (3, 5, 7), strict=True)
        )

    start = {"a": 1.0, "b": 1.0, "c": 1.0}
    found = pattern_search(loss, start, pairs=False)
    single = len(calls)
    assert list(found.values()) == pytest.approx([3, 5, 7], rel=0.02)
    assert all(sum(call[key] != start[key] for key in start) <= 1 for call in calls[:2])
    pattern_search(loss, start)
    assert len(calls) - single > 1.5 * single
