"""Frozen parameters take memory and gathers, and no gradients, moments or reductions."""

from pathlib import Path

import pytest

import planner

ROOT = Path(__file__).parents[2]
ADAPTED_8B = f"""
import sys

sys.path[:0] = [{str(ROOT / "examples")!r}, {str(ROOT / "tests" / "graph" / "zoo")!r}]
from llama import example_batch, llama_8b, loss_fn
from lora import adapt

LAYERS = ("wq", "wk", "wv", "wo", "w1", "w2", "w3")


def build_model():
    return adapt(llama_8b(), LAYERS, rank=16, scale=2.0)


def build_frozen_ends():
    model = llama_8b()
    for outer in (model.tok_embeddings, model.norm, model.output):
        outer.requires_grad_(False)
    return model
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    file = tmp_path_factory.mktemp("adapted") / "model.py"
    file.write_text(ADAPTED_8B)
    return file


@pytest.fixture(scope="module")
def adapted(model):
    return planner.trace(str(model), seq_len=4096).graph


def best(model, gpus, **fixed):
    return planner.estimate(
        str(model), gpus=gpus, cluster="h100-sxm", seq_len=4096, global_batch_size=16, fix=fixed
    ).best


def test_llama_8b_with_adapters_fits_one_80_gib_gpu(model, adapted):
    trained = adapted.num_trainable_parameters
    frozen = adapted.num_parameters - trained
    assert 40e6 < trained < 50e6
    plan = planner.plan(str(model), gpus=1, cluster="h100-sxm", seq_len=4096).best
    (memory,) = plan.memory_by_rank
    assert memory.params_bytes == pytest.approx(4 * trained + 2 * frozen, rel=1e-6)
    assert memory.optimizer_bytes == pytest.approx(8 * trained, rel=1e-6)
    assert memory.grads_bytes <= 4 * trained + 1


def test_backward_leaves_out_the_weight_gradients_of_frozen_weights(adapted):
    whole = planner.trace(str(ROOT / "examples/llama.py:llama_8b"), seq_len=4096).graph
    assert whole.backward_flop > 1.9 * whole.forward_flop
    assert adapted.backward_flop < 1.35 * adapted.forward_flop  # attention has two products each


def test_reductions_and_the_optimiser_count_trained_parameters(model, adapted):
    whole = best(ROOT / "examples/llama.py:llama_8b", 8, dp_shard=8, microbatch_size=1)
    thin = best(model, 8, dp_shard=8, microbatch_size=1)
    share = adapted.num_trainable_parameters / adapted.num_parameters
    assert thin.costs.dp_comm_s < whole.costs.dp_comm_s
    assert thin.costs.optimizer_s < max(0.02, 2 * share) * whole.costs.optimizer_s + 0.06


def test_a_frozen_embedding_and_head_reduce_nothing(model):
    whole = best(ROOT / "examples/llama.py:llama_8b", 8, dp_shard=8, microbatch_size=1)
    ends = best(f"{model}:build_frozen_ends", 8, dp_shard=8, microbatch_size=1)
    assert ends.costs.dp_comm_s < whole.costs.dp_comm_s
    table = 128256 * 4096
    saved = whole.memory_by_rank[0].params_bytes - ends.memory_by_rank[0].params_bytes
    assert saved == pytest.approx(2 * table * 2 / 8, rel=1e-3)
