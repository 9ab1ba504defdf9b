"""The log of a script as measured runs: its plan's own model and layout, whatever they are."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import planner
from planner.cli.main import run
from planner.errors import RequestError
from planner.plan.serialize import load_saved_plan
from planner.report.document import plan_json
from planner.validation.fitting.fit import calibrate_runs
from planner.validation.reading.logs import WARM_UP_STEPS
from planner.validation.reading.source import read_source

MODEL = """
import torch
from torch import nn

WIDTH = 256


def build_model():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def example_batch(microbatch_size):
    return torch.randn(microbatch_size, WIDTH), torch.randn(microbatch_size, WIDTH)


def loss_fn(output, targets):
    return (output - targets).square().mean()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a plan whose model file is gone: the copy beside it is enough."""
    root = tmp_path_factory.mktemp("logs")
    (root / "net.py").write_text(MODEL)
    result = planner.estimate(
        str(root / "net.py"), gpus=2, cluster="cpu", dtype="float32", fix={"microbatch_size": 4}
    )
    result.save(root / "plan")
    (root / "net.py").unlink()
    return root / "plan"


@pytest.fixture(scope="module")
def saved(folder):
    return load_saved_plan(folder)


@pytest.fixture
def write(folder, saved, tmp_path):
    """Write a log of some step times; fields of all its rows may be changed."""

    def write_log(times_s, *, file=folder / "log.jsonl", after="", **fields):
        rows = [
            {
                "step": step,
                "loss": 1.0,
                "step_time_s": time_s,
                "peak_memory_bytes": 2**30 + step,
                "peak_memory_of": "resident",
                "plan": saved.digest,
                **fields,
            }
            for step, time_s in enumerate(times_s, start=1)
        ]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows) + after)
        return file

    return write_log


TIMES_S = (9.0, 5.0, 4.0, 0.2, 0.4, 0.3, 7.0, 0.3)
"""Three to warm up, then a median of 0.3."""


def test_predicted_stands_beside_the_median_of_the_measured_steps(write, saved, capsys):
    result = planner.validate(write(TIMES_S))
    (found,) = result.runs.priced
    assert result.runs.measured["step_time_s"].tolist() == [0.3]
    assert result.runs.measured["peak_mem_gib"].tolist() == [pytest.approx(1, rel=1e-6)]
    assert found.step_time_s == pytest.approx(saved.plan.costs.step_time_s, rel=1e-12)
    assert found.peak_mem_bytes == saved.plan.peak_memory_bytes
    assert found.costs == saved.plan.costs
    error = saved.plan.costs.step_time_s / 0.3 - 1
    assert result.metrics.time.bias == pytest.approx(error)
    assert run(["validate", str(write(TIMES_S))]) == 0
    out = capsys.readouterr().out
    assert f"{error:+.1%}" in out
    assert "300 ms" in out
    assert "median of 5 steps, the first 3 are warm-up" in out


def test_memory_that_torch_allocated_is_held_to_what_it_allocates(write, saved):
    (found,) = planner.validate(write(TIMES_S, peak_memory_of="allocated")).runs.priced
    fullest = max(saved.plan.memory_by_rank, key=lambda memory: memory.total_bytes)
    assert found.peak_mem_bytes == fullest.total_bytes - fullest.reserve_bytes


def test_the_plan_is_beside_the_log_above_it_or_named(write, folder, tmp_path):
    inside = write(TIMES_S, file=folder / "checkpoints" / "log.jsonl")
    assert planner.validate(inside).metrics.rows.predicted == 1
    elsewhere = write(TIMES_S, file=tmp_path / "a" / "log.jsonl")
    with pytest.raises(RequestError, match=r"no plan\.json beside it"):
        planner.validate(elsewhere)
    assert planner.validate(elsewhere, plan=folder).metrics.rows.predicted == 1


def test_a_log_of_another_plan_is_refused(write):
    with pytest.raises(RequestError, match=r"its steps are of the plan feed, and .* is the plan"):
        planner.validate(write(TIMES_S, plan="feed"))
    alone = write(TIMES_S)
    alone.write_text(alone.read_text().replace('"plan"', '"other"'))
    with pytest.raises(RequestError, match="its steps name no plan"):
        planner.validate(alone)


def test_steps_of_another_run_and_a_cut_off_line_are_told(write):
    other = json.dumps({"step": 9, "step_time_s": 1.0, "peak_memory_bytes": 1, "plan": "feed"})
    evaluated = json.dumps({"step": 9, "eval_loss": 1.0})
    (found,) = planner.validate(write(TIMES_S, after=f"{other}\n{evaluated}\n{{")).runs.priced
    assert found.assumptions == (
        "median of 5 steps, the first 3 are warm-up",
        "line 11 is cut off, left out",
        "1 steps of another run left out",
    )


@pytest.mark.parametrize(
    ("times_s", "after", "words"),
    [
        ((), "", "0 steps, and the first 3 are warm-up"),
        (TIMES_S[:WARM_UP_STEPS], "", "3 steps, and the first 3 are warm-up"),
        (TIMES_S, '{"step"\n{}\n', "line 9 is no JSON"),
        ((*TIMES_S, -1.0), "", "step_time_s is -1.0, no number above 0"),
    ],
)
def test_what_is_no_log_is_told(write, times_s, after, words):
    with pytest.raises(RequestError, match=words):
        planner.validate(write(times_s, after=after))


def test_broken_lines_are_passed_over_where_asked(write):
    log = write(TIMES_S, after='{"step"\n{}\n')
    assert planner.validate(log, keep_going=True).metrics.rows.predicted == 1


def test_options_of_tables_and_logs_are_kept_apart(write, tmp_path):
    with pytest.raises(RequestError, match="is a log, which leaves nothing open"):
        planner.validate(write(TIMES_S), assume={"recompute": "full"})
    (tmp_path / "runs.csv").write_text("framework\n")
    with pytest.raises(RequestError, match="the runs are a table"):
        planner.validate(tmp_path / "runs.csv", plan=tmp_path)


def test_several_logs_are_several_runs(write, folder, tmp_path, saved):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    logs = [write(TIMES_S), write((*TIMES_S[:3], 0.5), file=copy / "log.jsonl")]
    result = planner.validate(logs)
    assert result.runs.measured["step_time_s"].tolist() == [0.3, 0.5]
    assert [each.row for each in result.runs.priced] == [0, 1]
    expected = pytest.approx(saved.plan.costs.step_time_s, rel=1e-12)
    assert [each.step_time_s for each in result.runs.priced] == [expected, expected]
    (tmp_path / "runs.csv").write_text("framework\n")
    with pytest.raises(RequestError, match="of tables one is read at a time"):
        planner.validate([logs[0], tmp_path / "runs.csv"])


def test_a_changed_model_is_not_priced(write, folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "model" / "net.py").write_text(MODEL.replace("range(4)", "range(5)"))
    result = planner.validate(write(TIMES_S, file=copy / "log.jsonl"))
    (reason,) = result.unpriced["reason"]
    assert "model's units" in reason
    assert "Has" in reason


def test_a_model_that_reads_what_lies_beside_it_is_found_there(write, tmp_path):
    code = MODEL.replace(
        "WIDTH = 256",
        "from pathlib import Path\nWIDTH = int(Path(__file__).with_suffix('.width').read_text())",
    )
    (tmp_path / "net.py").write_text(code)
    (tmp_path / "net.width").write_text("64")
    result = planner.estimate(
        str(tmp_path / "net.py"), gpus=2, cluster="cpu", dtype="float32", fix={"microbatch_size": 4}
    )
    result.save(tmp_path / "plan")
    saved = load_saved_plan(tmp_path / "plan")
    log = write(TIMES_S, file=tmp_path / "plan" / "log.jsonl", plan=saved.digest)
    assert len(planner.validate(log).runs.priced) == 1


def test_a_calibration_meets_the_log_and_plans_take_it(write, folder, tmp_path, capsys):
    log, own = write(TIMES_S), tmp_path / "own.toml"
    assert run(["calibrate", str(log), "--out", str(own)]) == 0
    assert "1 rows for 5 constants: together" in capsys.readouterr().out
    result = planner.validate(log, calibration=own)
    assert result.metrics.time.mape < 0.02
    again = planner.estimate(
        str(folder / "model" / "net.py"),
        gpus=2,
        cluster="cpu",
        dtype="float32",
        fix={"microbatch_size": 4},
        calibration=str(own),
    )
    (found,) = result.runs.priced
    assert again.best.costs.step_time_s == pytest.approx(found.step_time_s, rel=1e-9)


def test_allocated_memory_tells_no_reserve(write):
    def fitted(kind):
        table = read_source(write(TIMES_S, peak_memory_of=kind))
        constants = calibrate_runs(table, keep_going=False, progress=None).constants
        return "reserve_gib" in constants.framework["planner"]

    assert fitted("resident")
    assert not fitted("allocated")


def test_a_plan_of_own_constants_is_priced_by_them(write, folder, tmp_path):
    own = tmp_path / "own.toml"
    run(["calibrate", str(write(TIMES_S)), "--out", str(own), "-q"])
    calibrated = planner.estimate(
        str(folder / "model" / "net.py"),
        gpus=2,
        cluster="cpu",
        dtype="float32",
        fix={"microbatch_size": 4},
        calibration=str(own),
    )
    other = tmp_path / "plan"
    calibrated.save(other)
    log = write(TIMES_S, file=other / "log.jsonl", plan=load_saved_plan(other).digest)
    (found,) = planner.validate(log).runs.priced
    assert found.step_time_s == pytest.approx(calibrated.best.costs.step_time_s, rel=1e-9)
    gone = replace(
        calibrated.record, request=replace(calibrated.record.request, calibration="gone.toml")
    )
    (other / "plan.json").write_text(plan_json(gone))
    (reason,) = planner.validate(log).unpriced["reason"]
    assert "gone.toml" in reason
    assert not Path("gone.toml").exists()


def test_a_plan_over_two_kinds_of_device_is_priced_and_both_are_fitted(tmp_path):
    example = Path(__file__).parents[2] / "examples" / "gpt.py"
    result = planner.plan(
        f"{example}:gpt_1_3b",
        gpus=4,
        cluster="h100-sxm:2,a100-80gb-sxm:2",
        fix={"pp": 2},
        seq_len=1024,
    )
    result.save(tmp_path / "plan")
    digest = load_saved_plan(tmp_path / "plan").digest
    step_s = result.best.costs.step_time_s
    log = tmp_path / "plan" / "log.jsonl"
    log.write_text(
        "".join(
            json.dumps(
                {
                    "step": step,
                    "step_time_s": 2 * step_s,
                    "peak_memory_bytes": 2**30,
                    "plan": digest,
                }
            )
            + "\n"
            for step in range(1, 9)
        )
    )
    (found,) = planner.validate(log).runs.priced
    assert found.step_time_s == pytest.approx(step_s, rel=1e-12)
    assert found.costs == result.best.costs
    fitted = calibrate_runs(read_source(log), keep_going=False, progress=None)
    assert set(fitted.constants.device) == {"h100-sxm", "a100-80gb-sxm"}
    (errors,) = fitted.errors.values()
    assert errors.after < errors.before
