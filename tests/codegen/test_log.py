"""Rows of the log: what was measured beside what the plan says."""

import json

import pytest
import torch

from planner.runtime.log import Expected, Log
from planner.runtime.options import parse_options

EXPECTED = Expected(
    plan="0123456789abcdef",
    dtype="bfloat16",
    step_time_s=0.2,
    peak_memory_bytes=3 * 2**30,
    reserve_bytes=2**30,
    items_per_step=1000,
    item="samples",
    flop_per_step=10**12,
    peak_flop_per_s=2e13,
)


@pytest.fixture
def report(tmp_path, capsys, monkeypatch):
    """Report one step of half a second; give the row and the line on the screen."""
    times = iter((1.0, 1.5))
    monkeypatch.setattr("planner.runtime.log.time.perf_counter", lambda: next(times))

    def run(*arguments):
        file = tmp_path / "logs" / "log.jsonl"
        options = parse_options("", "bfloat16", ["--log", str(file), *arguments])
        log = Log(options, EXPECTED, torch.device("cpu"))
        log.start_step()
        assert not log.end_step(1, torch.tensor(2.5), torch.tensor(1.0))
        return json.loads(file.read_text()), capsys.readouterr().out

    return run


def test_a_row_has_predictions_beside_what_was_measured(report):
    row, line = report()
    assert row["step_time_s"] == 0.5
    assert row["samples_per_s"] == 2000
    assert row["mfu"] == pytest.approx(0.1)
    assert row["predicted_step_time_s"] == 0.2
    assert row["predicted_peak_memory_bytes"] == 3 * 2**30
    assert row["peak_memory_of"] == "resident"
    assert row["plan"] == EXPECTED.plan
    assert "500 (predicted 200) ms, 2000 samples/s, MFU 10.0%, peak " in line
    assert line.endswith("(predicted 3.00) GiB\n")


@pytest.mark.parametrize("arguments", [["--reference"], ["--dtype", "float32"]])
def test_what_is_not_the_planned_run_is_held_to_nothing(report, arguments):
    row, line = report(*arguments)
    assert set(row) == {
        *("step", "loss", "grad_norm", "step_time_s", "samples_per_s", "peak_memory_bytes")
    }
    assert "predicted" not in line
    assert "MFU" not in line
