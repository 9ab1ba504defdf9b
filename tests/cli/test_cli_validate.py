"""``plan validate`` and ``plan calibrate`` from the options to files, screen and exit code."""

import json
import sys
from types import ModuleType

import pandas as pd
import pytest

from planner.cli import validate_runner
from planner.cli.main import run
from planner.errors import ProfileError
from planner.progress import timed_phase
from planner.validation.types import Prediction, Unpriced

HEAD = (
    "framework,arch,model,layers,hidden,ffn,heads,vocab,seq_len,gpu,num_gpus,tp,pp,dp,"
    "zero_stage_or_fsdp,micro_batch,global_batch,recompute,seq_parallel,precision,step_time_s,"
    "peak_mem_gib"
)
SOUND = "own,gpt,{model},12,768,3072,12,50304,1024,a100,8,1,1,8,1,4,64,none,no,{dtype},{step},{gib}"


def table(*rows):
    """The text of a table; a row is (model, dtype, step time, GiB)."""
    lines = [
        SOUND.format(model=model, dtype=dtype, step=step, gib=gib)
        for model, dtype, step, gib in rows
    ]
    return "\n".join([HEAD, *lines]) + "\n"


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    rows = [(f"m{number % 7}", "bf16", 1.0 + number, 20) for number in range(70)]
    (tmp_path / "runs.csv").write_text(table(*rows, ("m0", "fp8", 1.0, "")))
    (tmp_path / "failed.csv").write_text(table(("m0", "bf16", "", "")))
    return tmp_path


@pytest.fixture
def priced(monkeypatch, make_prediction):
    """Plays the pricing: twice what was measured; what failed does not fit."""
    calls = []

    def predict_runs(runs, *, calibration, progress):
        with timed_phase(progress, "price"):
            calls.append(calibration)
            return [
                make_prediction(run.row, 2 * (run.step_time_s or 1.0), run.step_time_s is not None)
                for run in runs
            ]

    module = ModuleType("planner.validation.pricing.predict")
    module.predict_runs = predict_runs
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


@pytest.fixture
def make_prediction():
    from planner.cost.breakdown import CostBreakdown, MemoryBreakdown

    def make(row, step_time_s, feasible):
        seconds = dict.fromkeys(CostBreakdown.__dataclass_fields__, 0.0)
        sizes = dict.fromkeys(MemoryBreakdown.__dataclass_fields__, 0)
        return Prediction(
            row=row,
            step_time_s=step_time_s,
            peak_mem_bytes=25 * 2**30 if feasible else 90 * 2**30,
            feasible=feasible,
            costs=CostBreakdown(**{**seconds, "compute_s": step_time_s}),
            memory=MemoryBreakdown(**{**sizes, "params_bytes": 25 * 2**30}),
            assumptions=(),
        )

    return make


@pytest.fixture
def fitted(monkeypatch):
    """Plays the fit."""
    calls = []

    class Calibration:
        def to_toml(self):
            return "[constants]\n"

        def __init__(self, table):
            self.timed = [run for run in table.runs if run.step_time_s]
            self.left_out = (Unpriced(row=7, reason="pp 4 x 2 stages per rank > layers 6"),)

        def lines(self):
            return ["MAPE 20.0% before, 5.0% after"] if self.timed else []

    def calibrate_runs(table, *, keep_going, progress):
        calls.append(table)
        return Calibration(table)

    module = ModuleType("planner.validation.fitting.fit")
    module.calibrate_runs = calibrate_runs
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


def row(text, name):
    """The cells of the first line that begins with a name."""
    return next(
        line.removeprefix(name).split() for line in text.splitlines() if line.startswith(name)
    )


def test_the_screen_shows_figures_groups_verdicts_and_reasons(priced, capsys):
    assert run(["validate", "runs.csv", "--failed", "failed.csv"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "Runs    runs.csv: 71 rows, 70 priced, 1 not" in out
    assert "Failed  failed.csv: 1 row, 1 priced" in out
    assert row(out, "step time") == ["70", "100.0%", "100.0%", "+100.0%", "100.0%"]
    assert row(out, "  x 0.5 ")[1:] == ["0.0%", "0.0%"]
    assert row(out, "memory") == ["70", "25.0%", "25.0%", "+25.0%", "25.0%"]
    assert row(out, "top-1 regret") == ["0.0%", "0.0%", "0.0%"]
    assert "7 groups" in out
    assert "rank correlation 1.000" in out
    assert "caught             100.0% of 1 that failed" in out
    assert "false alarms       0.0% of 70 that ran" in out
    assert "   1  precision fp8 is not modelled  row 70 (line 72)" in out
    assert all(len(line) <= 80 for line in out.splitlines())


def test_five_groups_are_listed_and_all_with_verbose(priced, capsys):
    assert run(["validate", "runs.csv"]) == 0
    out, _ = capsys.readouterr()
    assert sum(line.startswith("m") and "+100.0%" in line for line in out.splitlines()) == 5
    assert "the worst 5, and 2 more (-v)" in out
    assert run(["validate", "runs.csv", "-v"]) == 0
    out, err = capsys.readouterr()
    assert sum(line.startswith("m") and "+100.0%" in line for line in out.splitlines()) == 7
    assert "more (-v)" not in out
    assert err.startswith("price ")


def test_many_reasons_are_cut_unless_verbose(priced, capsys, workplace):
    rows = [(f"m{number}", f"fp8-{number}", 1.0, "") for number in range(10)]
    (workplace / "runs.csv").write_text(table(*rows))
    assert run(["validate", "runs.csv"]) == 0
    assert "and 2 more reasons (-v)" in capsys.readouterr().out
    assert run(["validate", "runs.csv", "-v"]) == 0
    out = capsys.readouterr().out
    assert "more reasons" not in out
    assert "no row has a measured and a predicted step time" in out
    assert "no group of rows is large enough to choose in (--min-group)" in out


def test_json_is_the_document_and_nothing_else(priced, capsys):
    assert run(["validate", "runs.csv", "--json", "--out", "own.csv"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["metrics"]["time"]["mape"] == pytest.approx(1)
    assert err == "wrote own.csv\n"
    assert run(["validate", "runs.csv", "--json", "-q"]) == 0
    assert capsys.readouterr() == (out, "")


def test_files_are_written_and_not_replaced_unasked(priced, capsys, workplace):
    arguments = "validate runs.csv --failed failed.csv --out out/own.csv --failed-out f.csv"
    assert run([*arguments.split(), "--plot", "own.svg"]) == 0
    assert "Wrote own.svg, out/own.csv, f.csv" in capsys.readouterr().out
    own = pd.read_csv(workplace / "out" / "own.csv")
    assert own["row"].tolist() == list(range(71))
    assert own["step_time_s"].tolist()[:2] == [2.0, 4.0]
    assert own["peak_mem_gib"][0] == 25
    assert own["unpriced"][70] == "precision fp8 is not modelled"
    assert {"compute_s", "params_gib", "assumptions", "feasible"} <= set(own.columns)
    assert pd.read_csv(workplace / "f.csv")["feasible"].tolist() == [False]
    assert (workplace / "own.svg").read_text().startswith("<?xml")
    priced.clear()
    assert run(arguments.split()) == 2
    assert "the file exists" in capsys.readouterr().err
    assert priced == []
    assert run([*arguments.split(), "--force"]) == 0


def test_options_reach_the_pricing(priced, capsys, workplace):
    assert run(["validate", "runs.csv", "--calibration", "own.toml", "--min-group", "12"]) == 0
    assert str(priced[0]) == "own.toml"
    assert "no group of rows is large enough" in capsys.readouterr().out
    assert run(["validate", "runs.csv", "--capacity-gib", "24"]) == 0
    assert "false alarms  100.0% of 70 that ran" in capsys.readouterr().out


def test_wrong_rows_end_with_2_or_are_listed(priced, capsys, workplace):
    text = table(("m", "bf16", -1.0, 20), ("m", "bf16", 2.0, 20))
    (workplace / "runs.csv").write_text(text)
    assert run(["validate", "runs.csv"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "error: runs.csv: 1 row is wrong\n  row 0 (line 2), column step_time_s: -1.0" in err
    assert "--keep-going" in err
    assert priced == []
    assert run(["validate", "runs.csv", "--keep-going"]) == 0
    out = capsys.readouterr().out
    assert "2 rows, 1 priced, 1 not" in out
    assert "column step_time_s: -1.0 is not above 0" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.csv"], "none.csv: the table cannot be read"),
        (["runs.csv", "--failed-out", "f.csv"], "there are no failed rows to write"),
        (["runs.csv", "--plot", "runs.doc"], "there is no format .doc"),
        (["runs.csv", "--out", "a.png", "--plot", "a.png"], "both are the same file"),
        (["runs.csv", "--min-group", "0"], "--min-group 0: it must be at least 1"),
        ([], "Missing argument 'RUNS...'"),
    ],
)
def test_bad_usage_ends_with_2_before_any_work(priced, capsys, workplace, arguments, words):
    before = sorted(workplace.iterdir())
    assert run(["validate", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert priced == []
    assert sorted(workplace.iterdir()) == before


def test_errors_of_the_pricing_keep_their_exit_code(monkeypatch, capsys):
    def fail(*arguments, **options):
        raise ProfileError("own.toml: no such constant")

    monkeypatch.setattr(validate_runner, "validate", fail)
    assert run(["validate", "runs.csv"]) == 6
    assert "no such constant" in capsys.readouterr().err


def test_calibrate_writes_the_constants_and_tells_what_changed(fitted, capsys, workplace):
    assert run(["calibrate", "runs.csv", "--out", "own.toml"]) == 0
    out = capsys.readouterr().out
    assert "MAPE 20.0% before, 5.0% after" in out
    assert "precision fp8 is not modelled" in out
    assert "Wrote own.toml" in out
    assert (workplace / "own.toml").read_text() == "[constants]\n"
    assert "pp 4 x 2 stages per rank > layers 6" in out
    assert [len(each.runs) for each in fitted] == [70]
    assert run(["calibrate", "runs.csv", "--out", "own.toml"]) == 2
    assert "the file exists" in capsys.readouterr().err
    assert len(fitted) == 1


@pytest.mark.parametrize("only", [("m", "fp8", 1.0, ""), ("m", "bf16", "", "")])
def test_calibrate_needs_a_row(fitted, capsys, workplace, only):
    (workplace / "runs.csv").write_text(table(only))
    assert run(["calibrate", "runs.csv", "--out", "own.toml"]) == 2
    err = capsys.readouterr().err
    assert "there is nothing to fit to" in err
    assert "plan validate runs.csv" in err
    assert not (workplace / "own.toml").exists()
