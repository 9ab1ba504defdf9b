"""What ``tests/bench/gpu`` measures can be read, priced, fitted to and compared with."""

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import planner
from planner.cost import calibrate
from planner.cost.device_fit import fit_efficiency, price_op
from planner.cost.tables import KERNELS_TABLE, measured_folders, measured_samples
from planner.errors import ProfileError
from planner.hardware.profiles import PROFILES_FOLDER, list_devices, load_device

ROOT = Path(__file__).parents[2]
GPU = ROOT / "tests" / "bench" / "gpu"
DEVICE = "cpu"


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(GPU / script), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """A folder as the command leaves it; small shapes, on this CPU."""
    folder = tmp_path_factory.mktemp("measured") / DEVICE
    done = run("measure.py", "--out", str(folder), "--smoke")
    assert done.returncode == 0, done.stderr
    return folder


def rows_of(folder: Path, table: str) -> list[dict[str, str]]:
    with (folder / table).open(newline="") as file:
        return list(csv.DictReader(file))


def only(rows: list[dict[str, str]], **wanted: str) -> list[dict[str, str]]:
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def test_machine_says_what_was_measured_and_that_nothing_failed(measured):
    about = json.loads((measured / "machine.json").read_text())
    assert about["failed"] == []
    assert about["smoke"] is True
    assert about["command"].endswith("--smoke")
    assert about["rows"]["kernels.csv"] == len(rows_of(measured, "kernels.csv"))
    done, wanted = about["measured"].split(" of ")
    assert done == wanted


def test_a_projection_is_one_product_forward_and_two_backward(measured):
    rows = only(rows_of(measured, "kernels.csv"), group="matmul", dtype="float32")
    sizes = [(row["phase"], row["m"], row["n"], row["k"]) for row in rows]
    assert sizes == [
        ("forward", "32", "48", "64"),
        ("backward", "48", "64", "32"),
        ("backward", "32", "64", "48"),
    ]
    assert {row["flop"] for row in rows} == {str(2 * 32 * 48 * 64)}
    assert rows[0]["read_bytes"] == str(4 * (32 * 64 + 64 * 48))
    assert rows[0]["write_bytes"] == str(4 * 32 * 48)


def test_bytes_are_those_of_the_tensors(measured):
    rows = rows_of(measured, "kernels.csv")
    tensor_bytes = 4 * 32 * 64
    for kernel, tensors_read in (("gelu", 1), ("gelu_backward", 2), ("silu_backward", 2)):
        (row,) = only(rows, kernel=kernel)
        moved = (int(row["read_bytes"]), int(row["write_bytes"]))
        assert moved == (tensors_read * tensor_bytes, tensor_bytes)
    (gathered,) = only(rows, kernel="embedding")
    assert int(gathered["read_bytes"]) == tensor_bytes + 8 * 32  # the rows, and the indices
    (step,) = only(rows, kernel="_fused_adamw_")
    numbers = 4 * 4096
    assert int(step["write_bytes"]) == 3 * numbers
    assert int(step["read_bytes"]) == 4 * numbers + 4 * 16  # and the step of each parameter


def test_rows_are_nodes_of_the_operator_graph(measured):
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 48, False))
    graph = planner.trace(
        model,
        microbatch_size=32,
        dtype="float32",
        example_batch=lambda size: (torch.zeros(size, 64), torch.zeros(size, 48)),
        loss_fn=nn.functional.mse_loss,
    ).graph
    nodes = {
        (op.name, op.phase.value, op.flop, op.read_bytes, op.write_bytes) for op in graph.nodes
    }
    rows = [
        row
        for group in ("layer_norm", "gelu", "matmul")
        for row in only(rows_of(measured, "kernels.csv"), group=group, dtype="float32")
    ]
    assert len(rows) == 2 + 2 + 3
    for row in rows:
        numbers = (int(row[name]) for name in ("flop", "read_bytes", "write_bytes"))
        assert (row["kernel"], row["phase"], *numbers) in nodes, row


def test_repeats_spread_around_the_median(measured):
    for row in rows_of(measured, "kernels.csv"):
        assert 0 < float(row["seconds_p10"]) <= float(row["seconds"]) <= float(row["seconds_p90"])
        assert int(row["repeats"]) >= 5


def test_samples_have_the_work_of_their_rows(measured):
    samples = list(measured_samples(measured))
    assert len(samples) == len(rows_of(measured, "kernels.csv"))
    kinds = {sample.works[0].kind for sample in samples}
    assert kinds == {"matmul", "attention", "memory", "reduction", "embedding"}
    forward = [s.works[0] for s in samples if s.group == "flash_attention_for_cpu float32"]
    pairs, heads, head_dim = 64 * 64, 4, 16
    assert [work.flop for work in forward] == [4 * pairs * heads * head_dim] * 2
    masked = 64 * 63 // 2
    assert {work.masked_flop for work in forward} == {0, 4 * masked * heads * head_dim}
    assert {work.backward for work in forward} == {False}
    products = {(s.works[0].batch, s.works[0].m) for s in samples if s.group == "bmm float32"}
    assert products == {(4, 32), (4, 16)}


def test_the_errors_of_a_measured_device_are_shown(measured, monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "measured_folders", lambda: (measured,))
    assert calibrate.main([]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if f"measured/{DEVICE}" in line]
    groups = {sample.group for sample in measured_samples(measured)}
    assert len(lines) == len(groups)


def test_a_fit_finds_the_numbers_that_made_the_times(measured):
    device = load_device(DEVICE)
    true = replace(
        device,
        kernel_launch_s=2e-6,
        efficiency=replace(
            device.efficiency, pointwise_bandwidth_fraction=0.3, attention_forward_fraction=0.2
        ),
    )
    scale = 500.0  # so large that the work shows beside the launch
    samples = []
    for sample in measured_samples(measured):
        (work,) = sample.works
        larger = replace(
            work,
            flop=scale * work.flop,
            masked_flop=scale * work.masked_flop,
            read_bytes=scale * work.read_bytes,
            write_bytes=scale * work.write_bytes,
            m=0 if work.kind == "matmul" else work.m,
        )
        sample = replace(sample, works=(larger,))
        samples.append(replace(sample, measured_s=price_op(sample, true)))
    found = fit_efficiency(device, samples, fixed=("matmul_k_overhead_elements",))
    assert "matmul_k_overhead_elements" not in found
    assert found["kernel_launch_us"] == pytest.approx(2.0, rel=0.05)
    assert found["pointwise_fraction_of_bandwidth"] == pytest.approx(0.3, rel=0.03)
    assert found["attention_forward_fraction_of_peak"] == pytest.approx(0.2, rel=0.03)


def test_half_a_line_is_told_with_its_number(measured, tmp_path):
    lines = (measured / KERNELS_TABLE).read_text().splitlines()
    (tmp_path / KERNELS_TABLE).write_text("\n".join([*lines[:3], lines[3][:40]]))
    with pytest.raises(ProfileError, match=r"kernels\.csv, line 4"):
        list(measured_samples(tmp_path))


def test_the_cost_model_sizes_measured_blocks_exactly(measured):
    """On a CPU norms of Llama are not fused and keep more, so that GPT's blocks are held."""
    done = run("compare.py", str(measured))
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    errors = {(line[0], line[4]): float(line[-1].rstrip("%")) for line in lines[1:7]}
    assert len(errors) == 6
    assert abs(errors["gpt", "none"]) <= 0.5
    assert abs(errors["gpt", "full"]) <= 0.5
    assert [line[:2] for line in lines[8:]] == [
        ["all", "6"], ["gpt", "3"], ["llama", "3"], ["none", "2"], ["selective", "2"],
        ["full", "2"],
    ]  # fmt: skip


def test_a_used_up_budget_leaves_good_files(tmp_path):
    done = run("measure.py", "--out", str(tmp_path), "--smoke", "--budget-s", "0")
    assert done.returncode == 0, done.stderr
    assert list(measured_samples(tmp_path)) == []
    assert json.loads((tmp_path / "machine.json").read_text())["measured"].startswith("0 of ")
    again = run("measure.py", "--out", str(tmp_path), "--smoke")
    assert again.returncode == 2
    assert "already" in again.stderr


def test_measured_folders_are_named_as_devices():
    assert {folder.name for folder in measured_folders()} <= set(list_devices())
    assert (PROFILES_FOLDER / "measured" / "README.md").is_file()
