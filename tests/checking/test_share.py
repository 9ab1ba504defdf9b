"""Shares of single ranks on a real device: here on the CPU, by the code that a GPU runs."""

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import planner
from planner.checking.check import COMPONENTS, PlanCheck, StageCheck, check_plan
from planner.checking.document import check_json
from planner.checking.fake_world import fake_group, numbers_received
from planner.checking.share import (
    ShareCheck,
    _with_free_links,
    check_shares,
    price_without_links,
    timed_microbatches,
)
from planner.checking.share_run import MOST_STEPS, WARM_UP_STEPS
from planner.checking.workers import ONE_THREAD, Workers, grown_evenly
from planner.cli.check_screen import print_check
from planner.cli.main import run
from planner.errors import CheckError
from planner.framework.script import SCRIPT, framework_on_cluster
from planner.hardware.profiles import PROFILES_FOLDER
from planner.plan.serialize import load_saved_plan

EXAMPLES = Path(__file__).parents[2] / "examples"
GIB = 2**30

NOTING = f"""
import os, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import torch
from gpt import GPT, GPTConfig, example_batch
from gpt import loss_fn as own_loss


def build_model():
    return GPT(GPTConfig(vocab_size=512, block_size=64, n_layer=4, n_head=2, n_embd=64))


def loss_fn(output, targets):
    if "NOTES" in os.environ and not output.is_meta:
        with open(os.environ["NOTES"], "a") as notes:
            whole = type(output) is torch.Tensor  # parts of a rank are nobody's to look at
            is_finite = not whole or output.isfinite().all().item()
            notes.write(f"{{len(targets)}} {{is_finite}}\\n")
    return own_loss(output, targets)
"""


def save(folder, *, gpus, fix, cluster="cpu", **options):
    model = folder / "noting.py"
    model.write_text(NOTING)
    options = {"dtype": "float32", "global_batch_size": 8 * gpus, **options}
    fix = {"microbatch_size": 2, **fix}
    planner.estimate(str(model), gpus=gpus, cluster=cluster, fix=fix, **options).save(folder / "p")
    return load_saved_plan(folder / "p")


LAYOUTS = {
    "dp": {"dp_shard": 2, "dp_replicate": 2},
    "tp": {"tp": 2, "dp_shard": 2, "sequence_parallel": True},
    "cp": {"cp": 2, "dp_shard": 2},
    "pp": {"pp": 2, "dp_shard": 2, "schedule": "1F1B"},
    "interleaved": {"pp": 2, "tp": 2, "virtual_stages": 2},
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.bench if name == "pp" else ()) for name in LAYOUTS],
)
def test_a_share_takes_the_steps_of_its_rank(name, tmp_path):
    """All microbatches of the rank that has the loss, with numbers in them, and no other rank."""
    saved = save(tmp_path, gpus=4, fix=LAYOUTS[name])
    plan = saved.plan
    notes = tmp_path / "notes"
    environment = {**ONE_THREAD, "NOTES": str(notes), "CUDA_VISIBLE_DEVICES": ""}
    workers = Workers(
        module="planner.checking.share_run",
        folder=tmp_path / "p",
        reads="[]",
        environment=environment,
    )
    last = plan.degrees.world_size - plan.degrees.world_size // plan.degrees.pp
    (seen,) = workers.one_by_one([(last, plan.num_microbatches)]).values()
    assert seen["step_s"] > 0
    assert seen["device"] == "one core of the CPU"
    taken = notes.read_text().splitlines()
    steps, rest = divmod(len(taken), plan.num_microbatches)
    assert rest == 0
    assert WARM_UP_STEPS < steps <= WARM_UP_STEPS + MOST_STEPS
    assert set(taken) == {"2 True"}


def test_each_pipeline_rank_has_its_share(tmp_path):
    saved = save(tmp_path, gpus=4, fix=LAYOUTS["pp"])
    shares = check_shares(saved, tmp_path / "p", (2, 3), on_gpu=False)
    assert [share.pp_rank for share in shares] == [0, 1]
    for share, memory in zip(shares, saved.plan.memory_by_rank, strict=True):
        assert share.measured_busy_s > 0
        assert share.measured_peak_bytes is None
        assert share.memory_error == 0
        assert share.predicted_device_bytes == memory.total_bytes
        assert share.predicted_busy_s < saved.plan.costs.step_time_s


@pytest.mark.parametrize("fix", [{"pp": 2, "tp": 2}, {"dp_shard": 4}, {"cp": 2, "dp_shard": 2}])
def test_without_links_ranks_compute_as_planned_and_wait_for_nothing(fix, tmp_path):
    saved = save(tmp_path, gpus=4, fix=fix, cluster="h100-sxm", dtype="bfloat16")
    planned, free = saved.plan.costs, price_without_links(saved).costs
    # What a host issues while ranks exchange is no longer beside it.
    assert free.compute_s == pytest.approx(planned.compute_s, rel=0.02)
    assert free.step_time_s < planned.step_time_s
    assert free.pp_comm_s <= planned.pp_comm_s
    assert free.dp_comm_s <= planned.dp_comm_s


def test_one_device_has_no_links(tmp_path):
    saved = save(tmp_path, gpus=1, fix={}, cluster="h100-sxm", dtype="bfloat16")
    free_s = price_without_links(saved).costs.step_time_s
    assert free_s == pytest.approx(saved.plan.costs.step_time_s, rel=1e-12)


@given(
    each=st.floats(0.1, 10.0),
    once=st.floats(0.0, 10.0),
    first=st.integers(1, 20),
    more=st.integers(1, 20),
    number=st.integers(1, 500),
)
def test_what_grows_evenly_is_told_by_two_numbers(each, once, first, more, number):
    numbers = timed_microbatches((first, first + more), number)
    seen = [once + each * count for count in numbers]
    assert grown_evenly(seen, numbers, number) == pytest.approx(once + each * number)
    assert max(numbers) <= number
    assert (numbers[-1] - numbers[0]) % more == 0


def test_there_must_be_a_gpu(tmp_path, monkeypatch, capsys):
    save(tmp_path, gpus=1, fix={})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(["check", str(tmp_path / "p"), "--gpu"]) == 2
    assert "--gpu: torch sees no GPU on this machine" in capsys.readouterr().err


SHARE = ShareCheck(
    pp_rank=1,
    device="H200",
    predicted_busy_s=1.1,
    measured_busy_s=1.0,
    predicted_peak_bytes=96 * GIB,
    measured_peak_bytes=100 * GIB,
    predicted_device_bytes=99 * GIB,
    measured_device_bytes=110 * GIB,
)


def test_time_is_shown_and_memory_that_is_off_is_refused(capsys):
    stage = StageCheck(
        pp_rank=0,
        predicted_peak_bytes=96 * GIB,
        tracked_peak_bytes=96 * GIB,
        predicted_bytes=dict.fromkeys(COMPONENTS, 24 * GIB),
        tracked_bytes=dict.fromkeys(COMPONENTS, 24 * GIB),
    )
    check = PlanCheck(num_microbatches=(1,), stages=(stage,), collectives=(), shares=(SHARE,))
    check.demand()
    (row,) = json.loads(check_json(check))["shares"]
    assert row["time_error"] == pytest.approx(0.1)
    assert row["memory_error"] == pytest.approx(-0.04)
    print_check(Console(width=120), check, verbose=False)
    text = capsys.readouterr().out
    assert "1.1 s" in text
    assert "+10.0%" in text
    assert "100.00" in text
    far = replace(SHARE, measured_peak_bytes=103 * GIB)
    wrong = replace(check, shares=(SHARE, far))
    assert not wrong.holds
    with pytest.raises(CheckError, match=r"rank 1 had 103.0 GiB allocated.* 96.0 GiB: -6.8%"):
        wrong.demand()


def test_a_script_that_fails_on_the_device_is_told(tmp_path):
    saved = save(tmp_path, gpus=1, fix={})
    script = tmp_path / "p" / "train.py"
    script.write_text(script.read_text().replace("NUM_MICROBATCHES = 4", "NUM_MICROBATCHES = 0/0"))
    with pytest.raises(CheckError, match="the script does not run, on rank 0: ZeroDivisionError"):
        check_shares(saved, tmp_path / "p", (1,), on_gpu=False)


def test_the_check_is_the_same_without_a_device(tmp_path):
    save(tmp_path, gpus=2, fix={"dp_shard": 2})
    assert check_plan(tmp_path / "p").shares == ()


def test_every_buffer_that_is_received_in_gets_numbers_once():
    """Also one that comes to lie where another was."""
    memory = bytearray(32)
    with fake_group(0, 2), numbers_received():
        for _ in range(2):
            buffer = torch.frombuffer(memory, dtype=torch.float32).fill_(torch.nan)
            dist.P2POp(dist.irecv, buffer, 1)
            assert buffer.isfinite().all()
            first = buffer.clone()
            dist.P2POp(dist.irecv, buffer.view(2, 4), 1)
            assert torch.equal(buffer, first)
            del buffer


def test_what_ranks_exchange_in_pieces_of_given_sizes_has_numbers():
    with fake_group(0, 2), numbers_received():
        received = torch.full((4,), torch.nan)
        dist.all_to_all_single(received, torch.ones(4), [1, 3], [3, 1])
        assert received.isfinite().all()
        whole = torch.full((4,), torch.nan)
        dist.all_to_all_single(whole, torch.arange(4.0))
        assert torch.equal(whole, torch.arange(4.0))


def test_a_rank_by_itself_computes_at_the_rate_of_one_beside_no_traffic(tmp_path):
    """As a plan for one device does: the loss was fitted to runs of several."""
    several = save(tmp_path, gpus=2, fix={"dp_shard": 2}, cluster="h100-sxm", dtype="bfloat16")
    kept = several.cluster.device
    assert kept.beside_traffic_fraction < 1
    alone = framework_on_cluster(SCRIPT, "h100-sxm", gpus=1)[1].device
    assert alone.beside_traffic_fraction == 1
    freed = _with_free_links(several.cluster).device
    assert freed.efficiency.sustained_fraction == pytest.approx(alone.efficiency.sustained_fraction)
    assert freed.efficiency.matmul_fraction == pytest.approx(alone.efficiency.matmul_fraction)
    assert kept.efficiency.sustained_fraction < freed.efficiency.sustained_fraction


def test_the_readme_says_what_the_measured_shares_show():
    table = pd.read_csv(PROFILES_FOLDER / "measured" / "gpu_shares.csv")
    memory = (table.predicted_peak_bytes / table.measured_peak_bytes - 1).abs().median()
    time = (table.predicted_busy_s / table.measured_busy_s - 1).abs().median()
    words = " ".join((EXAMPLES.parent / "README.md").read_text().split())
    assert f"of {len(table)} shares" in words
    assert f"peak memory is off by {memory:.1%} in the median, time by {time:.1%}" in words
