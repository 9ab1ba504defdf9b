"""Predicted memory against the live tensors of the emitted script, rank by rank."""

import sys
from pathlib import Path

import pytest
from launch import run, torchrun

import planner

pytestmark = pytest.mark.run

TRACKER = Path(__file__).with_name("track_peak.py")
GPT = Path(__file__).parents[2] / "examples" / "gpt.py"

MODEL = f"""
import sys
sys.path.insert(0, {str(GPT.parent)!r})
from gpt import GPT, GPTConfig, example_batch, loss_fn


def build_model():
    return GPT(GPTConfig(vocab_size=4096, block_size=256, n_layer=8, n_head=8, n_embd=256))
"""

ZERO_3 = {"dp_shard": 2, "reshard_after_forward": True}
ZERO_2 = {"dp_shard": 2, "reshard_after_forward": False}
PIPELINE = {"pp": 2, "schedule": "1F1B"}

CASES = {
    "zero_3": {**ZERO_3, "microbatch_size": 4, "activation_checkpointing": "none"},
    "zero_3_full": {**ZERO_3, "microbatch_size": 8, "activation_checkpointing": "full"},
    "zero_2": {**ZERO_2, "microbatch_size": 4, "activation_checkpointing": "none"},
    "zero_2_selective": {**ZERO_2, "microbatch_size": 8, "activation_checkpointing": "selective"},
    "pipeline": {**PIPELINE, "microbatch_size": 4, "activation_checkpointing": "none"},
    "pipeline_full": {**PIPELINE, "microbatch_size": 4, "activation_checkpointing": "full"},
}
TOLERANCE = 0.04


@pytest.mark.parametrize("case", CASES)
def test_the_peak_is_what_was_predicted(case, tmp_path):
    model = tmp_path / "model.py"
    model.write_text(MODEL)
    result = planner.estimate(
        str(model), gpus=2, cluster="cpu", dtype="float32", seq_len=256, global_batch_size=16,
        fix=CASES[case],
    )  # fmt: skip
    folder = tmp_path / "run"
    result.save(folder)
    run([sys.executable, *torchrun(2), str(TRACKER), str(folder)], timeout_s=100)
    for rank in range(2):
        memory = result.best.memory_by_rank[rank if result.best.degrees.pp > 1 else 0]
        predicted = memory.total_bytes - memory.reserve_bytes
        measured = int((folder / f"peak-{rank}").read_text())
        assert predicted == pytest.approx(measured, rel=TOLERANCE), memory
