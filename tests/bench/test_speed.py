"""Wall time and memory of the command, cold: ``make bench`` prints them."""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from full_size import DEEP_LLAMA, DEEPSEEK_V3, FULL_SIZES

ROOT = Path(__file__).resolve().parents[2]

CHILD = """
import resource, sys, time
from planner.cli.main import main
search_s = [0.0]
if "--help" not in sys.argv:  # which imports as little as it may
    from planner.search.run import Search
    search = Search.run
    def timed(self):
        start_s = time.process_time()
        try:
            return search(self)
        finally:
            search_s[0] += time.process_time() - start_s
    Search.run = timed
try:
    main()
finally:  # it leaves as the command does, which ends without looking for garbage
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent_s = used.ru_utime + used.ru_stime
    print("cpu_s, search_s, peak_kib", spent_s, search_s[0], used.ru_maxrss, file=sys.stderr)
"""


@dataclass(frozen=True)
class Cold:
    """One run in a process of its own."""

    wall_s: float
    cpu_s: float
    search_s: float
    """Of the processor, in the search alone."""
    peak_mib: float
    answer: str


def run_cold(*arguments):
    start_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    wall_s = time.perf_counter() - start_s
    assert done.returncode == 0, done.stderr
    *_, cpu_s, search_s, peak_kib = done.stderr.split()
    cold = Cold(
        wall_s=wall_s,
        cpu_s=float(cpu_s),
        search_s=float(search_s),
        peak_mib=int(peak_kib) / 1024,
        answer=done.stdout,
    )
    words = " ".join(arguments)
    print(
        f"\nplan {words}: {cold.wall_s:.2f} s wall, {cold.cpu_s:.2f} s of the processor "
        f"({cold.search_s:.2f} s in the search), "
        f"{cold.peak_mib:.0f} MiB peak"
    )
    return cold


@pytest.mark.bench
def test_help_is_instant():
    assert run_cold("--help").wall_s < 0.5


@pytest.mark.bench
def test_a_plan_for_an_8b_model_takes_seconds():
    cold = run_cold("examples/llama.py:llama_8b", "--gpus", "8", "--json")
    assert cold.wall_s < 12
    assert cold.peak_mib < 1024


@pytest.mark.bench
@pytest.mark.parametrize(
    ("size", "gpus"),
    [
        *(("8b", 8), ("8b", 512), ("8b", 131072), ("70b", 64), ("70b", 256)),
        *(("405b", 1024), ("405b", 16384)),
    ],
)
def test_a_large_model_is_planned_and_proven(size, gpus):
    check_proven(f"examples/llama.py:llama_{size}", gpus, seq_len=8192)


@pytest.mark.bench
@pytest.mark.parametrize(
    ("size", "gpus", "samples", "most"),
    [("70b", 96, 768, 0.001), ("70b", 2048, None, 0.02), ("405b", 16384, None, 0.001)],
)
def test_short_steps_are_planned(size, gpus, samples, most):
    """Of few tokens: stages that share ranks pay, and their proof is what takes long."""
    batch = [] if samples is None else ["--global-batch-size", str(samples)]
    cold = run_cold(f"examples/llama.py:llama_{size}", "--gpus", str(gpus), *batch, "--json")
    solver = json.loads(cold.answer)["solver"]
    gap = 1 - solver["bound_s"] / solver["objective_s"]
    print(f"{size} x {gpus}: {solver['status']}, {solver['objective_s']:.3f} s, gap {gap:.2%}")
    assert gap <= most


@pytest.mark.bench
def test_a_large_mixture_is_planned_and_proven(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    check_proven(str(tmp_path / "config.json"), 2048, seq_len=4096)


DISTINCT = "tests/bench/distinct_blocks.py"


@pytest.mark.bench
@pytest.mark.parametrize(("blocks", "stages"), [(150, 16), (1000, 64), (1024, 32)])
def test_blocks_that_all_differ_are_cut_best(blocks, stages, monkeypatch):
    """No run of them stands for another."""
    cold = run_distinct(blocks, stages, monkeypatch)
    solver = json.loads(cold.answer)["solver"]
    print(f"{blocks} blocks on {stages} stages: {1e3 * solver['objective_s']:.1f} ms")
    assert solver["gap"] <= 0.001
    assert cold.peak_mib < 2048


def run_distinct(blocks, stages, monkeypatch):
    monkeypatch.setenv("BLOCKS", str(blocks))
    fixed = ("--fix", f"pp={stages}", "--fix", "schedule=1F1B")
    return run_cold(DISTINCT, "--gpus", str(stages), *fixed, "--json")


def check_proven(model, gpus, *, seq_len):
    cold = run_cold(model, "--gpus", str(gpus), "--seq-len", str(seq_len), "--json")
    solver = json.loads(cold.answer)["solver"]
    gap = 1 - solver["bound_s"] / solver["objective_s"]
    print(f"{model} x {gpus}: {solver['status']}, gap {gap:.2%}")
    assert gap <= 0.001
    assert cold.peak_mib < 2048


@pytest.mark.bench
@pytest.mark.parametrize("name", FULL_SIZES)
def test_a_model_of_full_size_is_traced_in_seconds(name, tmp_path):
    expected = FULL_SIZES[name]
    model = expected.model
    if expected.config is not None:
        (tmp_path / model).write_text(json.dumps(expected.config))
        model = str(tmp_path / model)
    elif model == "deep.py":
        (tmp_path / model).write_text(DEEP_LLAMA.format(examples=str(ROOT / "examples")))
        model = str(tmp_path / model)
    length = ["--seq-len", str(expected.seq_len)] if expected.seq_len else []
    cold = run_cold("trace", model, *length, "--json")
    graph = json.loads(cold.answer)
    forward, backward = graph["forward_flop"] / 1e12, graph["backward_flop"] / 1e12
    print(
        f"{name}: {cold.wall_s:.1f} s, {cold.peak_mib:.0f} MiB, {graph['ops']:,} operators, "
        f"{graph['parameters'] / 1e9:.2f} B parameters, {forward:.4g} + {backward:.4g} TFLOP, "
        f"{graph['saved_bytes'] / 2**30:.1f} GiB saved, {len(graph['cuts'])} cuts, "
        f"blocks {graph['block_pattern']}"
    )
    assert graph["parameters"] == expected.parameters
    assert expected.pattern in ("", graph["block_pattern"])
    assert cold.wall_s < expected.most_s
    assert cold.peak_mib < expected.most_mib
