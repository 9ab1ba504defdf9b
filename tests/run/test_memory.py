"""Predicted memory against the live tensors of the emitted script, rank by rank."""

from pathlib import Path

import pytest
from driver import run_ranks
from track_peak import track_peak

import planner

pytestmark = pytest.mark.run

GPT = Path(__file__).parents[2] / "examples" / "gpt.py"
LORA = Path(__file__).parents[1] / "graph" / "zoo" / "lora.py"

MODEL = f"""
import sys
sys.path.insert(0, {str(GPT.parent)!r})
from gpt import GPT, GPTConfig, example_batch, loss_fn


def build_model():
    return GPT(GPTConfig(vocab_size=4096, block_size=128, n_layer=6, n_head=8, n_embd=256))
"""

ADAPTERS = f"""
{MODEL.replace("def build_model", "def build_whole")}
sys.path.insert(0, {str(LORA.parent)!r})
from lora import adapt


def build_model():
    return adapt(build_whole(), ("c_attn", "c_proj", "c_fc"), rank=16, scale=2.0)
"""

ZERO_3 = {"dp_shard": 2, "reshard_after_forward": True}
ZERO_2 = {"dp_shard": 2, "reshard_after_forward": False}
PIPELINE = {"pp": 2, "schedule": "1F1B"}
SPLIT = {"tp": 2, "sequence_parallel": True}

CASES = {
    "zero_3": {**ZERO_3, "microbatch_size": 4, "activation_checkpointing": "none"},
    "zero_3_full": {**ZERO_3, "microbatch_size": 8, "activation_checkpointing": "full"},
    "zero_2": {**ZERO_2, "microbatch_size": 4, "activation_checkpointing": "none"},
    "zero_2_selective": {**ZERO_2, "microbatch_size": 8, "activation_checkpointing": "selective"},
    "pipeline": {**PIPELINE, "microbatch_size": 4, "activation_checkpointing": "none"},
    "pipeline_full": {**PIPELINE, "microbatch_size": 4, "activation_checkpointing": "full"},
    "tensor_parallel_full": {**SPLIT, "microbatch_size": 8, "activation_checkpointing": "full"},
    "whole_stream": {
        **SPLIT,
        "sequence_parallel": False,
        "microbatch_size": 8,
        "activation_checkpointing": "selective",
    },
    "both": {**SPLIT, **PIPELINE, "microbatch_size": 4, "activation_checkpointing": "none"},
}
TOLERANCE = 0.04
MORE = ("zero_3", "zero_2", "pipeline", "whole_stream", "tensor_parallel_full")
"""For the bench: others have all of it."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=pytest.mark.bench if name in MORE else ()) for name in CASES],
)
def test_the_peak_is_what_was_predicted(case, tmp_path):
    check(MODEL, CASES[case], tmp_path)


@pytest.mark.parametrize(
    "case",
    [
        "zero_3",
        *(
            pytest.param(name, marks=pytest.mark.bench)
            for name in ("tensor_parallel_full", "zero_2_selective", "pipeline")
        ),
    ],
)
def test_the_peak_with_frozen_parameters(case, tmp_path):
    check(ADAPTERS, CASES[case], tmp_path)


def check(source, fixed, tmp_path):
    model = tmp_path / "model.py"
    model.write_text(source)
    gpus = max(2, fixed.get("tp", 1) * fixed.get("pp", 1))
    result = planner.estimate(
        str(model), gpus=gpus, cluster="cpu", dtype="float32", seq_len=128, global_batch_size=16,
        fix=fixed,
    )  # fmt: skip
    folder = tmp_path / "run"
    result.save(folder)
    run_ranks(track_peak, str(folder), num_processes=gpus)
    for rank in range(gpus):
        memory = result.best.memory_by_rank[rank * result.best.degrees.pp // gpus]
        predicted = memory.total_bytes - memory.reserve_bytes
        measured, *starts = map(int, (folder / f"peak-{rank}").read_text().split())
        assert predicted == pytest.approx(measured, rel=TOLERANCE), memory
        assert max(starts) == starts[0], "a step leaves tensors behind"
