"""The shipped profiles match the published tables as well as profiles/published/README.md says."""

import pytest

from planner.cost.calibrate import (
    DEVICES,
    LINK_FITS,
    fit_link,
    link_errors,
    main,
    measured_errors,
    op_errors,
    op_samples,
)
from planner.cost.pattern_search import pattern_search
from planner.cost.tables import measured_folders
from planner.hardware.profiles import PROFILES_FOLDER, load_cluster

STATED_OP = {  # (device, part of the table): (median, MAPE) of |predicted / measured - 1|
    ("A100-80GB-SXM", "matmul"): (0.046, 0.066),
    ("H100-80GB-SXM", "matmul"): (0.057, 0.079),
    ("A40-48GB", "matmul"): (0.048, 0.068),
    ("V100-32GB-SXM2", "matmul"): (0.094, 0.098),
    ("A100-80GB-SXM", "residual add"): (0.206, 0.243),
    ("H100-80GB-SXM", "residual add"): (0.301, 0.299),
    ("A40-48GB", "residual add"): (0.092, 0.238),
    ("V100-32GB-SXM2", "gelu"): (0.053, 0.213),
    ("A100-80GB-SXM", "rms_norm"): (0.130, 0.184),
    ("H100-80GB-SXM", "rms_norm"): (0.211, 0.235),
    ("A40-48GB", "rms_norm"): (0.074, 0.156),
    ("V100-32GB-SXM2", "layernorm"): (0.138, 0.273),
    ("A100-80GB-SXM", "silu_and_mul"): (0.431, 0.374),
    ("H100-80GB-SXM", "silu_and_mul"): (0.322, 0.302),
    ("A40-48GB", "silu_and_mul"): (0.081, 0.140),
}
STATED_LINK = {
    ("a100_dgx", "all_reduce, 8 ranks on 1"): (0.221, 0.277),
    ("A100-80GB-SXM", "all_reduce, 8 ranks on 1"): (0.052, 0.115),
    ("h100_dgx", "all_reduce, 8 ranks on 1"): (0.167, 0.234),
    ("h100_dgx", "send_recv, 2 ranks on 1"): (0.074, 0.103),
    ("h100_dgx", "send_recv, 2 ranks on 2"): (0.080, 0.090),
    ("H200-141GB-SXM", "all_reduce, 8 ranks on 1"): (0.027, 0.048),
    ("B200-180GB-SXM", "all_reduce, 8 ranks on 1"): (0.063, 0.068),
    ("B200-180GB-SXM", "all_reduce, 32 ranks on 4"): (0.021, 0.058),
}
ROUNDING = 0.002


def test_op_errors_are_as_stated() -> None:
    found = {(error.system, error.group): error for error in op_errors()}
    assert set(found) == set(STATED_OP)
    for key, (median, mape) in STATED_OP.items():
        assert found[key].median <= median + ROUNDING, key
        assert found[key].mape <= mape + ROUNDING, key


def test_link_errors_are_as_stated() -> None:
    found = {(error.system, error.group): error for error in link_errors()}
    for key, (median, mape) in STATED_LINK.items():
        assert found[key].median <= median + ROUNDING, key
        assert found[key].mape <= mape + ROUNDING, key


def test_all_rows_of_the_tables_are_used() -> None:
    rows = {gpu: len(samples) for gpu, samples in op_samples().items()}
    assert rows == {
        "A100-80GB-SXM": 1215 + 405,
        "H100-80GB-SXM": 1080 + 390,
        "A40-48GB": 1080 + 390,
        "V100-32GB-SXM2": 60 + 334 + 62,
    }
    assert set(rows) == set(DEVICES)


def test_a_new_fit_finds_the_stored_link() -> None:
    (fit,) = [fit for fit in LINK_FITS if (fit.cluster, fit.index) == ("b200-sxm", 0)]
    link = load_cluster("b200-sxm", gpus=8).links[0]
    found = fit_link(fit)
    assert found["gb_per_s"] * 1e9 == pytest.approx(link.bandwidth_bytes_per_s, rel=0.02)
    assert found["ramp_mib_per_rank"] * 2**20 == pytest.approx(link.ramp_bytes, rel=0.1)
    assert found["latency_us_per_collective"] * 1e-6 == pytest.approx(link.base_latency_s, rel=0.1)


def test_the_search_follows_a_bent_valley() -> None:
    def loss(values) -> float:
        return abs(values["a"] * values["b"] - 6) + abs(values["a"] - 3) / 10 + values["c"]

    found = pattern_search(
        loss, {"a": 1.0, "b": 1.0, "c": 5.0, "d": 2.0}, fixed=("c",), most={"d": 1.0}
    )
    assert found["a"] == pytest.approx(3, rel=0.1)
    assert found["a"] * found["b"] == pytest.approx(6, rel=0.05)
    assert found["c"] == 5.0


def test_the_command_prints_a_line_for_each_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert "gemm_measurements" in printed
    parts = (*op_errors(), *measured_errors(measured_folders()), *link_errors())
    assert len(printed.splitlines()) == 1 + len(parts)


def test_the_stated_errors_stand_in_the_readme() -> None:
    text = (PROFILES_FOLDER / "published" / "README.md").read_text()
    for (system, group), (median, mape) in {**STATED_OP, **STATED_LINK}.items():
        assert f"| {system} | {group} | {median:.1%} | {mape:.1%} |" in text
