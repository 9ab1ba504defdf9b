"""A table of runs, priced by an answer that the test makes up, and scored."""

import json
import sys
from types import ModuleType

import pandas as pd
import pytest
from run_tables import make_prediction, make_table

import planner
from planner.errors import RequestError
from planner.validation.types import Unpriced

TIMES = [{"step_time_s": 4.0 + number, "model": "m"} for number in range(5)]


@pytest.fixture
def priced(monkeypatch):
    """Plays the pricing: a tenth above what was measured, 9 s where nothing was."""
    calls = []

    def predict_runs(runs, *, calibration, progress):
        calls.append({"runs": list(runs), "calibration": calibration, "progress": progress})
        return [answer(run) for run in runs]

    def answer(run):
        if run.gpu == "H1000":
            return Unpriced(row=run.row, reason="there is no profile H1000", column="gpu")
        if run.ffn is None:
            return Unpriced(row=run.row, reason="ffn is not stated")
        return make_prediction(
            run.row,
            1.1 * run.step_time_s if run.step_time_s else 9.0,
            peak_gib=44 if run.step_time_s else 90,
            feasible=run.step_time_s is not None,
            assumptions=("vocab 50304 (not stated)", "dropout 0 (not stated)"),
        )

    module = ModuleType("planner.validation.pricing.predict")
    module.predict_runs = predict_runs
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


def test_the_figures_follow_from_the_predictions(priced):
    result = planner.validate(make_table(*TIMES))
    assert result.metrics.rows.predicted == 5
    assert result.metrics.time.mape == pytest.approx(0.1)
    assert result.metrics.time.best_scale == pytest.approx(1 / 1.1)
    assert result.metrics.memory.bias == pytest.approx(0.1)
    assert result.metrics.ranking.top1_regret.mean == pytest.approx(0)
    assert result.metrics.oom is None
    assert result.failed_predictions is None
    assert result.by_group["spearman"].tolist() == pytest.approx([1])
    assert repr(result) == (
        "ValidationResult('the table': 5 of 5 rows priced, step time MAPE 10.0%, median 10.0%)"
    )


def test_options_reach_the_pricing(priced, tmp_path):
    events = []
    planner.validate(make_table(), calibration=str(tmp_path / "own.toml"), progress=events.append)
    assert priced[0]["calibration"] == tmp_path / "own.toml"
    assert priced[0]["progress"] == events.append


def test_both_tables_are_priced_in_one_go(priced):
    failed = make_table({"step_time_s": None, "mfu": None, "model": "m"})
    result = planner.validate(make_table(*TIMES), failed=failed)
    assert [len(call["runs"]) for call in priced] == [6]
    assert result.failed_predictions["row"].tolist() == [0]
    assert result.metrics.oom.caught == 1
    assert result.metrics.oom.false_alarms == 0
    assert result.metrics.ranking.with_failed.top1_failed == 0


def test_a_prediction_holds_its_breakdown(priced):
    (row,) = planner.validate(make_table()).predictions.to_dict("records")
    assert list(row)[:4] == ["row", "step_time_s", "peak_mem_gib", "feasible"]
    assert (row["row"], row["peak_mem_gib"], row["feasible"]) == (0, 44.0, True)
    seconds = [value for name, value in row.items() if name.endswith("_s")]
    assert sum(seconds) == pytest.approx(2 * row["step_time_s"])
    gib = [value for name, value in row.items() if name.endswith("_gib")]
    assert sum(gib) == pytest.approx(2 * 44.0)
    assert row["assumptions"] == "vocab 50304 (not stated); dropout 0 (not stated)"


def test_rows_without_a_prediction_say_why(priced):
    table = make_table({}, {"precision": "fp8"}, {"ffn": None}, {})
    result = planner.validate(table)
    assert result.unpriced.to_dict("records") == [
        {
            "table": "the table",
            "row": 1,
            "column": None,
            "reason": "precision fp8 is not modelled",
        },
        {"table": "the table", "row": 2, "column": None, "reason": "ffn is not stated"},
    ]
    predictions = result.predictions
    assert predictions["row"].tolist() == [0, 1, 2, 3]
    assert predictions["step_time_s"].notna().tolist() == [True, False, False, True]
    assert predictions["unpriced"].tolist()[1:3] == result.unpriced["reason"].tolist()
    assert result.metrics.rows.missing == 2


def test_cells_that_the_pricing_finds_wrong_are_an_error(priced):
    table = make_table({}, {"gpu": "H1000"})
    with pytest.raises(
        RequestError, match=r"row 1 \(line 3\), column gpu: there is no profile H1000"
    ):
        planner.validate(table)
    result = planner.validate(table, keep_going=True)
    assert result.unpriced["column"].tolist() == ["gpu"]
    assert len(result.runs.priced) == 1


def test_nothing_is_compared_with_a_wrong_row(priced):
    table = make_table(
        *TIMES, {"step_time_s": 0.004, "tokens_per_s_per_gpu": 32768.0, "model": "m"}
    )
    result = planner.validate(table, keep_going=True)
    assert result.metrics.rows.measured == 6
    assert result.metrics.rows.with_step_time == 5
    assert result.metrics.ranking.top1_regret.mean == pytest.approx(0)
    assert result.plotted_points["measured_s"].min() == 4.0


def test_errors_name_the_table(priced, tmp_path):
    file = tmp_path / "failed.csv"
    make_table({"tp": 0}).to_csv(file, index=False)
    with pytest.raises(RequestError, match=r"failed\.csv: 1 row is wrong"):
        planner.validate(make_table(), failed=file)
    assert priced == []


@pytest.mark.parametrize(
    ("options", "words"),
    [({"min_group": 0}, "--min-group 0"), ({"capacity_gib": -1.0}, "--capacity-gib -1")],
)
def test_options_out_of_range_are_errors(priced, options, words):
    with pytest.raises(RequestError, match=words):
        planner.validate(make_table(), **options)


def test_the_document_holds_everything(priced):
    failed = make_table({"step_time_s": None, "mfu": None}, {"precision": "fp8"})
    result = planner.validate(make_table(*TIMES, {"ffn": None}), failed=failed)
    document = json.loads(result.to_json())
    assert document["metrics"]["time"]["mape"] == pytest.approx(0.1)
    assert set(document["metrics"]) == {"rows", "time", "ranking", "memory", "oom"}
    assert document["metrics"]["oom"]["failed_rows"] == 2
    assert [group["rows"] for group in document["by_group"]] == [5]
    assert document["predictions"][0]["costs"]["step_time_s"] == pytest.approx(4.4)
    assert [each["row"] for each in document["failed_predictions"]] == [0]
    assert [each["row"] for each in document["unpriced"]] == [5]
    assert [each["row"] for each in document["failed_unpriced"]] == [1]


def test_an_empty_table_has_an_answer(priced):
    result = planner.validate(make_table().iloc[:0])
    assert result.predictions.empty
    assert json.loads(result.to_json())["metrics"]["time"]["mape"] is None
    assert "no step time to compare" in repr(result)


def test_wrong_sizes_of_groups_are_no_numbers_in_the_document(priced):
    result = planner.validate(
        make_table({"seq_len": "long"}), keep_going=True, min_group=1, failed=make_table()
    )
    assert json.loads(result.to_json())["metrics"]["rows"]["measured"] == 1


@pytest.mark.parametrize(("ending", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_the_picture_is_written(priced, tmp_path, ending, start):
    file = tmp_path / f"runs.{ending}"
    planner.validate(make_table(*TIMES, {"num_gpus": 4, "dp": 1, "step_time_s": 9.0})).plot(file)
    assert file.read_bytes().startswith(start)


def test_the_picture_shows_rows_with_both_times(priced):
    table = make_table({}, {"step_time_s": None}, {"ffn": None}, {"step_time_s": 5.0})
    points = planner.validate(table).plotted_points
    expected = {"measured_s": [4.0, 5.0], "predicted_s": [4.4, 5.5], "num_gpus": [8, 8]}
    pd.testing.assert_frame_equal(points.reset_index(drop=True), pd.DataFrame(expected))


def test_pictures_that_cannot_be_drawn_are_errors(priced, tmp_path, monkeypatch):
    result = planner.validate(make_table({"step_time_s": None}))
    with pytest.raises(RequestError, match="no row has a measured and a predicted step time"):
        result.plot(tmp_path / "runs.png")
    with pytest.raises(RequestError, match=r"there is no format \.doc"):
        result.plot(tmp_path / "runs.doc")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RequestError, match="it is not installed") as caught:
        result.plot(tmp_path / "runs.png")
    assert caught.value.hint == "pip install 'parallel-training-planner[plots]'"
    assert list(tmp_path.iterdir()) == []
