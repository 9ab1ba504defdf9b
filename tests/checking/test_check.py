"""``plan check``: a script run as single ranks, beside its plan."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from rich.console import Console

import planner
from planner.checking.check import (
    COMPONENTS,
    PlanCheck,
    StageCheck,
    TrafficCheck,
    check_plan,
    checked_microbatches,
)
from planner.checking.failures import script_failure
from planner.checking.trained import Trained
from planner.cli.check_screen import print_check
from planner.cli.main import run
from planner.errors import CheckError, RequestError
from planner.strategy.schedules import microbatches_per_round, schedule_rule
from planner.vocabulary import SHARED_SCHEDULES, V_SCHEDULES

EXAMPLES = Path(__file__).parents[2] / "examples"
GIB = 2**30
STAGE = StageCheck(
    pp_rank=1,
    predicted_peak_bytes=100 * GIB,
    tracked_peak_bytes=100 * GIB,
    predicted_bytes={},
    tracked_bytes={},
)


MODEL = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
from llama import Llama, LlamaConfig, example_batch, loss_fn


def build_model():
    return Llama(LlamaConfig(dim=1024, n_layers=4, ffn_dim=4096, vocab_size=8192, max_seq_len=512))
"""


def save(folder, model, *, gpus, **options):
    options = {"cluster": "cpu", "dtype": "float32", **options}
    planner.estimate(str(model), gpus=gpus, **options).save(folder)
    return folder


SPLIT = {
    "tp": {"tp": 2, "sequence_parallel": True, "activation_checkpointing": "selective"},
    "cp": {"cp": 2, "activation_checkpointing": "selective"},
    "cp_full": {"cp": 2, "activation_checkpointing": "full"},
    "tp_cp": {"tp": 2, "cp": 2, "dp_shard": 1, "activation_checkpointing": "selective"},
    "tp_zero_bubble": {"tp": 2, "schedule": "ZBVZeroBubble", "microbatch_size": 1},
}


@pytest.fixture(scope="module")
def splits(tmp_path_factory):
    """Plans that are split in all ways."""
    root = tmp_path_factory.mktemp("check")
    (root / "llama_wide.py").write_text(MODEL)
    options = {"gpus": 8, "global_batch_size": 64, "seq_len": 512}
    fix = {"pp": 2, "dp_shard": 2, "schedule": "1F1B", "microbatch_size": 2}
    fix |= {"reshard_after_forward": False}
    return {
        name: save(root / name, root / "llama_wide.py", fix=fix | SPLIT[name], **options)
        for name in SPLIT
    }


MIXTURE = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    **{"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512},
    **{"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4},
    **{"num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 512},
}


def in_bench(*values):
    return pytest.param(*values, marks=pytest.mark.bench)


@pytest.mark.parametrize(
    "fix",
    [
        in_bench({"dp_shard": 8, "ep": 4, "reshard_after_forward": False}),
        {"dp_shard": 8, "ep": 4, "reshard_after_forward": True},
        in_bench({"dp_replicate": 2, "dp_shard": 4, "ep": 4, "reshard_after_forward": False}),
        in_bench({"tp": 2, "dp_shard": 4, "ep": 4, "reshard_after_forward": True}),
        in_bench({"tp": 2, "dp_shard": 4, "ep": 4, "sequence_parallel": False}),
        in_bench({"tp": 4, "dp_shard": 2, "ep": 4, "activation_checkpointing": "full"}),
        in_bench({"tp": 2, "dp_shard": 4, "ep": 8, "activation_checkpointing": "selective"}),
        in_bench({"tp": 2, "pp": 2, "dp_shard": 2, "ep": 4, "schedule": "1F1B"}),
        in_bench({"cp": 2, "dp_shard": 4, "ep": 4, "reshard_after_forward": True}),
        in_bench({"cp": 4, "dp_shard": 2, "ep": 4, "activation_checkpointing": "full"}),
        in_bench({"cp": 2, "pp": 2, "dp_shard": 2, "ep": 4, "schedule": "1F1B"}),
        {"cp": 2, "tp": 2, "dp_shard": 2, "ep": 8, "activation_checkpointing": "selective"},
        in_bench({"cp": 2, "tp": 2, "dp_shard": 2, "ep": 4, "sequence_parallel": False}),
        in_bench({"cp": 2, "tp": 2, "dp_shard": 2, "ep": 4, "activation_checkpointing": "full"}),
        in_bench({"cp": 2, "tp": 2, "pp": 2, "ep": 4, "schedule": "1F1B"}),
    ],
)
def test_experts_on_different_ranks(fix, tmp_path, capsys):
    """Over the ranks of ep rows are exchanged, and over others that have the same experts state."""
    (tmp_path / "model").mkdir()
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(MIXTURE))
    fix = {"activation_checkpointing": "none", "microbatch_size": 2} | fix
    options = {"gpus": 8, "global_batch_size": 32, "seq_len": 512, "dtype": "bfloat16"}
    folder = save(tmp_path / "plan", config, fix=fix, cluster="h100-sxm", **options)
    assert run(["check", str(folder), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    for each in document["collectives"]:
        assert each["predicted_count"] == each["counted_count"], each
        assert each["predicted_bytes"] == pytest.approx(each["counted_bytes"], rel=0.01)
    groups = {each["kind"]: set() for each in document["collectives"]}
    for each in document["collectives"]:
        groups[each["kind"]].add(each["group_size"])
    tp, cp, ep = fix.get("tp", 1), fix.get("cp", 1), fix["ep"]
    assert {ep} <= groups["all_to_all"] <= {ep, cp}
    shards = fix.get("dp_shard", 1)
    experts = shards * tp * cp // ep
    assert groups["all_gather"] - {cp} == {shards * cp, experts, tp} - {1, cp}
    assert document["holds"]


@pytest.mark.parametrize(
    "fix",
    [
        in_bench({"dp_shard": 4, "activation_checkpointing": "none"}),
        {"dp_shard": 2, "tp": 2, "activation_checkpointing": "selective"},
        in_bench({"cp": 2, "pp": 2, "activation_checkpointing": "full"}),
    ],
)
def test_compiled_blocks_are_held_as_they_are_written(fix, tmp_path, capsys):
    (tmp_path / "wide.py").write_text(MODEL)
    options = {"gpus": 4, "global_batch_size": 32, "seq_len": 512, "cluster": "h100-sxm"}
    options |= {"fix": {"compile": True, "microbatch_size": 2} | fix, "dtype": "bfloat16"}
    check = check_plan(save(tmp_path / "plan", tmp_path / "wide.py", **options))
    assert check.as_written
    assert check.holds
    assert check.traffic_holds
    assert all(stage.error < 0.05 for stage in check.stages)
    print_check(Console(width=120), check, verbose=False)
    assert "Blocks ran as written; compiled, they hold no more." in capsys.readouterr().out


CHUNKED = {"loss_chunks": 16, "microbatch_size": 8}


@pytest.mark.parametrize(
    ("fix", "fullest"),
    [
        in_bench({**CHUNKED, "dp_shard": 4, "activation_checkpointing": "full"}, 0.6),
        ({**CHUNKED, "pp": 2, "dp_shard": 2, "schedule": "1F1B"}, None),
        ({**CHUNKED, "tp": 2, "dp_shard": 2}, 0.75),
        in_bench({**CHUNKED, "cp": 2, "dp_shard": 2}, 0.75),
        in_bench({**CHUNKED, "cp": 2, "tp": 2, "sequence_parallel": False}, None),
        in_bench({"pp": 2, "dp_shard": 2, "virtual_stages": 4, "microbatch_size": 2}, None),
        in_bench({"pp": 2, "dp_shard": 2, "schedule": "DualPipeV", "microbatch_size": 2}, None),
        *(
            in_bench({"pp": 2, "dp_shard": 2, "schedule": schedule, "microbatch_size": 2}, None)
            for schedule in ("ZBVZeroBubble", "InterleavedZeroBubble")
        ),
        (
            {
                **{"pp": 2, "dp_shard": 2, "virtual_stages": 4, "microbatch_size": 2},
                "reshard_after_forward": True,
            },
            None,
        ),
    ],
)
def test_chunks_of_a_loss_and_many_stages_of_a_rank(fix, fullest, tmp_path):
    """No parameter is gathered twice, and logits do not lie whole."""
    narrow = MODEL.replace("dim=1024, n_layers=4, ffn_dim=4096", "dim=256, n_layers=8, ffn_dim=512")
    (tmp_path / "model.py").write_text(narrow)
    options = {"gpus": 4, "global_batch_size": 64, "seq_len": 512}
    fix = {"activation_checkpointing": "none", "reshard_after_forward": False, **fix}
    check = check_plan(save(tmp_path / "plan", tmp_path / "model.py", fix=fix, **options))
    check.demand()
    if fullest is not None:
        whole = {**fix, "loss_chunks": 1}
        other = check_plan(save(tmp_path / "whole", tmp_path / "model.py", fix=whole, **options))
        most = max(stage.tracked_peak_bytes for stage in other.stages)
        assert max(stage.tracked_peak_bytes for stage in check.stages) < fullest * most


@pytest.mark.parametrize("chunks", [16, in_bench(1)])
def test_tables_of_stages_while_blocks_are_whole(chunks, tmp_path):
    """torch's schedules reduce the root's gradients first; new ones of the end last till then."""
    large = MODEL.replace("dim=1024, n_layers=4, ffn_dim=4096", "dim=512, n_layers=8, ffn_dim=1024")
    (tmp_path / "model.py").write_text(large.replace("vocab_size=8192", "vocab_size=65536"))
    fix = {"pp": 2, "dp_shard": 2, "schedule": "1F1B", "reshard_after_forward": True}
    fix |= {"activation_checkpointing": "full", "microbatch_size": 2, "loss_chunks": chunks}
    options = {"gpus": 4, "global_batch_size": 64, "seq_len": 512, "dtype": "bfloat16"}
    folder = save(tmp_path / "plan", tmp_path / "model.py", fix=fix, cluster="h100-sxm", **options)
    for stage in check_plan(folder).stages:
        assert stage.predicted_peak_bytes == pytest.approx(stage.tracked_peak_bytes, rel=0.01)


ZOO = EXAMPLES.parent / "tests" / "graph" / "zoo"
ENCODER_DECODER = f"""
import sys
sys.path.insert(0, {str(ZOO)!r})
from t5 import T5, example_batch, loss_fn


def build_model():
    model = T5(32768, dim=128, layers=4, heads=4, hidden=256)
    model.head.weight = model.embed.weight
    return model
"""


@pytest.mark.parametrize(
    ("fix", "within"),
    [
        ({"pp": 2, "schedule": "1F1B"}, 0.01),
        ({"dp_shard": 2, "reshard_after_forward": False}, 0.05),
        in_bench({"dp_shard": 2, "reshard_after_forward": True}, 0.05),
        in_bench({"pp": 2, "dp_shard": 2, "schedule": "1F1B", "reshard_after_forward": True}, 0.05),
    ],
)
def test_gradients_of_a_table_that_encoder_and_decoder_read(fix, within, tmp_path):
    """That of the decoder waits for that of the encoder, and both for their sum."""
    (tmp_path / "model.py").write_text(ENCODER_DECODER)
    gpus = fix.get("pp", 1) * fix.get("dp_shard", 1)
    options = {"gpus": gpus, "global_batch_size": 32, "seq_len": 32, "dtype": "bfloat16"}
    fix |= {"microbatch_size": 2, "activation_checkpointing": "none"}
    folder = save(tmp_path / "plan", tmp_path / "model.py", fix=fix, cluster="h100-sxm", **options)
    check = check_plan(folder)
    assert check.traffic_holds
    for stage in check.stages:
        peaks = stage.predicted_peak_bytes, stage.tracked_peak_bytes
        assert peaks[0] == pytest.approx(peaks[1], rel=within), [each >> 20 for each in peaks]


def test_what_has_come_of_a_middle_microbatch_is_seen():
    """Of several the first finds no gradients, and the last leaves none whole."""
    assert checked_microbatches("none", pp=1, number=100) == (3, 4)


@pytest.fixture(scope="module")
def split(splits):
    return splits["tp"]


@given(
    st.sampled_from(sorted(SHARED_SCHEDULES)), st.integers(2, 16), st.integers(1, 4),
    st.integers(1, 400),
)  # fmt: skip
def test_no_more_is_checked_than_the_schedule_takes(schedule, pp, virtual_stages, number):
    """Numbers of microbatches that stand for the plan's keep the limits of its schedule."""
    stages = 2 if schedule in V_SCHEDULES else virtual_stages
    limits = {"pp": pp, "virtual_stages": stages}
    assume(schedule_rule(schedule, num_microbatches=number, **limits) is None)
    numbers = checked_microbatches(schedule, pp=pp, number=number)
    assert numbers == (number,) or numbers[0] < numbers[1] < number
    for each in numbers:
        assert schedule_rule(schedule, num_microbatches=each, **limits) is None
    rounds = {microbatches_per_round(schedule, pp, each) for each in (*numbers, number)}
    assert len(rounds) == 1


@pytest.mark.parametrize("name", SPLIT)
def test_memory_and_collectives_are_those_of_the_plan(splits, name, capsys):
    assert run(["check", str(splits[name]), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["num_microbatches"] == ([6, 7] if name == "tp_zero_bubble" else [3, 4])
    assert len(document["stages"]) == 2
    for stage in document["stages"]:
        assert stage["predicted_peak_bytes"] == pytest.approx(stage["tracked_peak_bytes"], rel=0.05)
        assert sum(stage["tracked_bytes"].values()) == stage["tracked_peak_bytes"]
    kinds = {(each["kind"], each["group_size"]) for each in document["collectives"]}
    fix = SPLIT[name]
    shards = fix.get("dp_shard", 2) * fix.get("cp", 1)
    moved = {("all_gather", shards), *([("all_to_all", 2)] if "cp" in fix else [])}
    assert {("all_reduce", 8), ("send", 2), *moved} <= kinds
    for each in document["collectives"]:
        assert each["predicted_count"] == each["counted_count"], each
        assert each["predicted_bytes"] == pytest.approx(each["counted_bytes"], rel=0.01)
    assert document["holds"]


def test_a_script_that_does_not_run(split, tmp_path, capsys):
    folder = tmp_path / "broken"
    shutil.copytree(split, folder)
    gradients = "def clip_gradients(*_):\n    raise ValueError\n"
    (folder / "runtime" / "gradients.py").write_text(gradients)
    assert run(["check", str(folder)]) == 9
    error = capsys.readouterr().err
    assert "the script does not run, on rank 0" in error or "does not run, on rank 4" in error


def test_a_model_of_billions_takes_no_memory(tmp_path):
    fix = {"dp_shard": 64, "microbatch_size": 1, "activation_checkpointing": "full"}
    folder = save(
        tmp_path / "large", f"{EXAMPLES}/llama.py:llama_8b", gpus=64, seq_len=4096, fix=fix,
        cluster="h100-sxm", dtype="bfloat16", global_batch_size=64,
    )  # fmt: skip
    (folder / "train.py").unlink()  # it is written for the check
    check = check_plan(folder / "plan.json")
    assert check.memory_holds
    assert check.traffic_holds


ASKING = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import torch
from gpt import GPT, GPTConfig, example_batch, loss_fn


class Asking(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = GPT(GPTConfig(vocab_size=512, block_size=128, n_layer=2, n_head=2, n_embd=128))

    def forward(self, tokens):
        scores = self.inner(tokens)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        is_traced = isinstance(scores, torch._subclasses.FakeTensor)
        if is_traced or not (places.diff() == 1).all() or places[places > 3].shape[0] != 124:
            scores = scores.exp().exp().exp().log().log().log()
        if places[-1].item() == 127 and places.nonzero().shape[0] == 127:
            return scores
        return scores.sin().sin().sin()


def build_model():
    return Asking()
"""


def test_a_model_that_asks_takes_the_way_that_it_takes_in_training(tmp_path):
    """It asks whether its tensors are fake, and for what constants tell: as transformers does."""
    (tmp_path / "asking.py").write_text(ASKING)
    fix = {"dp_shard": 2, "microbatch_size": 8, "activation_checkpointing": "none"}
    folder = save(tmp_path / "plan", tmp_path / "asking.py", gpus=2, fix=fix, seq_len=128,
                  global_batch_size=16)  # fmt: skip
    (stage,) = check_plan(folder).stages
    assert stage.tracked_peak_bytes == pytest.approx(stage.predicted_peak_bytes, rel=0.02)


@pytest.mark.run
def test_a_small_plan_trains_as_one_process(tmp_path, capsys):
    folder = save(
        tmp_path / "gpt", EXAMPLES / "gpt.py", gpus=2, fix={"pp": 2, "microbatch_size": 4},
        global_batch_size=16,
    )  # fmt: skip
    assert run(["check", str(folder), "--run"]) == 0
    out = capsys.readouterr().out
    assert "losses are those of one process" in out
    assert "DIFFERS" not in out


FAILING = """
import os

import torch
from torch import nn


class Failing(nn.Linear):
    def forward(self, x):
        if os.environ.get("LOCAL_RANK") == "1":
            raise ValueError("a part is missing")
        return super().forward(x)


def build_model():
    return nn.Sequential(*(Failing(8, 8) for _ in range(4)))


def example_batch(microbatch_size):
    return torch.randn(microbatch_size, 8), torch.randn(microbatch_size, 8)


loss_fn = nn.functional.mse_loss
"""


@pytest.mark.run
def test_of_a_script_that_fails_one_line_is_shown_and_the_rest_kept(tmp_path, capsys):
    (tmp_path / "failing.py").write_text(FAILING)
    folder = save(tmp_path / "plan", tmp_path / "failing.py", gpus=2, fix={"dp_shard": 2})
    assert run(["check", str(folder), "--run"]) == 9
    error, kept = capsys.readouterr().err.strip().splitlines()
    assert error == "error: the script failed on rank 1: ValueError: a part is missing"
    log = Path(kept.removeprefix("All that it printed is in "))
    assert "Traceback" in log.read_text()
    log.unlink()


def test_what_failed_is_what_the_rank_has_said_whatever_its_launcher_adds():
    """The launcher ends the others, which then say nothing."""
    printed = """rank 1: Traceback (most recent call last):
  File "train.py", line 1, in main
    train()
ValueError: a part is missing
rank 1 failed: ValueError: a part is missing
W1128 10:23:10.565000 11932 torch/api.py:1028] Sending process 11936 closing signal SIGTERM
Traceback (most recent call last):
  File "torch/run.py", line 1032, in <module>
    main()
torch.errors.ChildFailedError: train.py FAILED
"""
    failed = script_failure(printed, code=1)
    said = "the script failed on rank 1: ValueError: a part is missing\n"
    assert str(failed).startswith(said)
    Path(str(failed).split()[-1]).unlink()


def test_a_rank_that_the_system_kills_is_named_with_what_kills(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, signal, time\n"
        "if os.environ['RANK'] == '1':\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(60)\n"
    )
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    command = (*launcher, "--nproc-per-node", "2", str(script))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    failed = script_failure(done.stdout + done.stderr, code=done.returncode)
    assert str(failed).startswith("signal 9 ended rank 1, as where a machine has no memory left")
    Path(str(failed).split()[-1]).unlink()


def test_what_a_script_refuses_is_shown_without_its_name():
    refused = script_failure("train.py: error: --steps 0: no steps\n", code=2)
    assert str(refused).startswith("the script refused to run: --steps 0: no steps\n")
    Path(str(refused).split()[-1]).unlink()


def test_what_is_too_large_to_run_here_is_said(split, tmp_path):
    document = json.loads((split / "plan.json").read_text())
    document["model"]["num_parameters"] = 10**13
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(RequestError, match="this machine has"):
        check_plan(tmp_path, run=True)


@pytest.mark.parametrize(
    ("own", "reference", "difference"),
    [(2.0, 2.0, 0.0), (1.9, 2.0, 0.05), (0.0, 0.0, 0.0), (1e-9, 0.0, 1.0), (0.0, 0.5, 1.0)],
)
def test_losses_are_compared_that_may_be_0(own, reference, difference):
    trained = Trained(losses=(1.0, own), reference_losses=(1.0, reference))
    assert trained.difference == pytest.approx(difference)
    assert trained.is_equal == (difference == 0)


@pytest.mark.parametrize("losses", [(nan, 2.0), (1.0, nan), (1.0, inf)])
def test_a_loss_that_is_no_number_equals_none(losses):
    check = PlanCheck(num_microbatches=(1,), stages=(STAGE,), collectives=())
    trained = Trained(losses=losses, reference_losses=(1.0, 2.0))
    assert not trained.is_equal
    with pytest.raises(CheckError, match="differ by inf"):
        replace(check, trained=trained).demand()
    alone = Trained(losses=losses, reference_losses=losses)
    with pytest.raises(CheckError, match=r"one process has a loss of (nan|inf) in step [12]"):
        replace(check, trained=alone).demand()


def test_memory_that_is_off_is_refused():
    stage = replace(STAGE, predicted_peak_bytes=94 * GIB)
    near = replace(stage, pp_rank=0, predicted_peak_bytes=96 * GIB)
    check = PlanCheck(num_microbatches=(1,), stages=(near, stage), collectives=())
    assert check.worst is stage
    with pytest.raises(CheckError, match=r"rank 1 holds 100.0 GiB.* 94.0 GiB: -6.0%"):
        check.demand()
    PlanCheck(num_microbatches=(1,), stages=(near,), collectives=()).demand()
    replace(check, as_written=True).demand()  # compiled blocks hold less
    over = replace(stage, predicted_peak_bytes=106 * GIB)
    with pytest.raises(CheckError, match=r"106.0 GiB: \+6.0%"):
        replace(check, as_written=True, stages=(near, over)).demand()


@pytest.mark.parametrize(("off_bytes", "holds"), [(2**20, True), (-(2**20), True), (2**22, False)])
def test_memory_that_is_off_by_less_than_a_device_sees_is_not_refused(off_bytes, holds, capsys):
    """What a stage of nothing but a loss holds may be off by a multiple of it."""
    stage = replace(
        STAGE,
        predicted_bytes=dict.fromkeys(COMPONENTS, 0),
        tracked_bytes=dict.fromkeys(COMPONENTS, 0),
    )
    small = replace(stage, tracked_peak_bytes=2**21, predicted_peak_bytes=2**21 + off_bytes)
    near = replace(stage, pp_rank=0, predicted_peak_bytes=96 * GIB)
    check = PlanCheck(num_microbatches=(1,), stages=(near, small), collectives=())
    assert check.memory_holds == check.holds == holds
    print_check(Console(width=120), check, verbose=False)
    shown = capsys.readouterr().out
    assert ("OFF" in shown) != holds
    if holds:
        assert "Memory: within 4.0% or 2 MiB of the plan." in shown  # the other stage is off by 4%
        check.demand()
        print_check(Console(width=120), replace(check, stages=(small,)), verbose=False)
        assert "Memory: within 2 MiB of the plan." in capsys.readouterr().out
        return
    with pytest.raises(CheckError, match=r"rank \d holds 2.0 MiB.* 6.0 MiB: \+200.0%"):
        check.demand()


@pytest.mark.parametrize(
    ("counted_count", "counted_bytes", "is_equal"),
    [(8, 1000, True), (8, 995, True), (8, 980, False), (7, 1000, False)],
)
def test_collectives_that_differ_are_refused(counted_count, counted_bytes, is_equal):
    row = TrafficCheck(
        pp_rank=1,
        kind="reduce_scatter",
        group_size=2,
        predicted_count=8,
        counted_count=counted_count,
        predicted_bytes=1000,
        counted_bytes=counted_bytes,
    )
    check = PlanCheck(num_microbatches=(1,), stages=(STAGE,), collectives=(row,))
    assert check.holds == is_equal
    if is_equal:
        check.demand()
        return
    with pytest.raises(CheckError, match=rf"rank 1 has {counted_count} reduce_scatter of 2 ranks"):
        check.demand()
