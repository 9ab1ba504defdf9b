"""The fit against rows that the cost model made itself with known constants."""

from dataclasses import replace

import pytest
from run_tables import make_runs

from planner.cost.pattern_search import pattern_search
from planner.errors import RequestError
from planner.framework.calibration import load_calibration
from planner.validation.fitting.fit import (
    Constant,
    calibrate_runs,
    constants_of,
    fit_constants,
    mean_error,
)
from planner.validation.pricing.case_price import CasePricer
from planner.validation.pricing.cases import case_of
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
    Constant("framework", "nanotron", "host_dispatch_us"): 30.0,
    Constant("device", "h100-sxm", "training_fraction_of_sustained"): 0.6,
    Constant("framework", "nanotron", "collective_host_us"): 150.0,
    Constant("framework", "nanotron", "gradient_overlap"): 0.3,
    Constant("framework", "nanotron", "step_us"): 15000.0,
}
RESERVE = Constant("framework", "nanotron", "reserve_gib")


@pytest.fixture(scope="module")
def pricer():
    return CasePricer()


@pytest.fixture(scope="module")
def runs(pricer):
    """Rows whose time and memory are those of the model under ``TRUE`` and 2 GiB besides."""
    found = []
    for run in make_runs(*ROWS):
        price = pricer.price(case_of(run), constants_of(TRUE | {RESERVE: 2.0}))
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
    errors = [mean_error(cases, constants_of(each), pricer=pricer) for each in (found, start)]
    assert errors[0] < 0.01 < errors[1]
    for constant in list(TRUE)[:3]:
        assert found[constant] == pytest.approx(TRUE[constant], rel=0.05), constant


def test_the_same_rows_give_the_same_constants(pricer, runs):
    cases = [case_of(run) for run in runs[:6]]
    start = {each: 1.3 * value for each, value in TRUE.items()}
    assert fit_constants(cases, start, pricer=pricer) == fit_constants(
        list(cases), dict(start), pricer=CasePricer()
    )


def test_held_constants_and_zeros_keep_their_values(pricer, runs):
    cases = [case_of(run) for run in runs[:4]]
    step, message = (Constant("framework", "nanotron", key) for key in ("step_us", "message_us"))
    held = {each: value for each, value in TRUE.items() if each != step}
    found = fit_constants(cases, {step: 40000.0, message: 0.0}, held=held, pricer=pricer)
    assert found[message] == 0
    assert found[step] == pytest.approx(TRUE[step], rel=0.05)


def test_far_rows_do_not_pull_the_constants(pricer, runs):
    cases = [case_of(run) for run in runs]
    slow = replace(runs[0], step_time_s=50 * runs[0].step_time_s)
    found = fit_constants([*cases, case_of(slow)], TRUE, pricer=pricer)
    assert found == pytest.approx(TRUE, rel=0.05)


class TestCalibration:
    def test_it_lowers_the_error_and_finds_the_reserve(self, runs):
        events = []
        calibration = calibrate_runs(table(runs), keep_going=False, progress=events.append)
        ((pair, errors),) = calibration.errors.items()
        assert pair == ("nanotron", "h100-sxm")
        assert errors.num_rows == len(runs)
        assert errors.after < errors.before / 4
        found = calibration.constants.framework["nanotron"]
        assert found["reserve_gib"] == pytest.approx(2.0, abs=0.5)
        assert set(calibration.constants.device) == {"h100-sxm"}
        assert set(calibration.constants.cluster) == {"h100-sxm"}
        assert calibration.left_out == ()
        ended = [event.phase for event in events if event.elapsed_s is not None]
        assert ended == ["price", "fit"]

    def test_rows_that_cannot_be_priced_are_listed(self, runs):
        refused = replace(runs[1], row=77, cp=2)
        calibration = calibrate_runs(table([*runs[:3], refused]), keep_going=False, progress=None)
        assert [each.row for each in calibration.left_out] == [77]
        assert "context parallelism" in calibration.left_out[0].reason
        assert calibration.errors["nanotron", "h100-sxm"].num_rows == 3

    def test_unknown_names_are_an_error_or_listed(self, runs):
        mixed = table([*runs[:2], replace(runs[2], row=5, gpu="H1000")])
        with pytest.raises(RequestError, match=r"own.csv: 1 row is wrong\n  row 5 .* column gpu"):
            calibrate_runs(mixed, keep_going=False, progress=None)
        calibration = calibrate_runs(mixed, keep_going=True, progress=None)
        assert [each.column for each in calibration.left_out] == ["gpu"]

    def test_constants_at_their_bounds_are_told(self, runs):
        fast = [replace(run, step_time_s=run.step_time_s / 4) for run in runs]
        calibration = calibrate_runs(table(fast), keep_going=False, progress=None)
        assert "training_fraction_of_sustained" in calibration.at_bound
        assert any("(at its bound)" in line for line in calibration.lines())

    def test_rows_without_a_time_are_not_fitted_to(self, runs):
        untimed = [replace(run, step_time_s=None) for run in runs[:2]]
        calibration = calibrate_runs(table(untimed), keep_going=False, progress=None)
        assert calibration.errors == {}
        assert calibration.lines() == []

    def test_what_changes_no_price_is_not_fitted(self, runs):
        inside = [run for run in runs if run.num_gpus <= 8]
        calibration = calibrate_runs(table(inside[:2]), keep_going=False, progress=None)
        assert calibration.constants.cluster == {}
        assert "host_dispatch_us" in calibration.constants.framework["nanotron"]

    def test_its_file_is_read_again(self, runs, tmp_path):
        calibration = calibrate_runs(table(runs[:3]), keep_going=False, progress=None)
        file = tmp_path / "own.toml"
        file.write_text(calibration.to_toml())
        found = load_calibration(file)
        assert set(found.device["h100-sxm"]) == {"training_fraction_of_sustained"}
        for name, values in calibration.constants.framework.items():
            assert found.framework[name] == pytest.approx(values, rel=1e-5)


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
