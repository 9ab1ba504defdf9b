"""Memory and time of units against closed forms and the graph itself."""

from pathlib import Path

import pytest

from planner.cost.collective import all_reduce_s
from planner.graph.loading.load import load_model
from planner.graph.sizes.family import trace_family
from planner.hardware.profiles import load_cluster
from planner.hardware.topology import MeshAxis, comm_group
from planner.pricing.choice import ShardingChoice
from planner.pricing.model_pricing import ModelPricer
from planner.vocabulary import RECOMPUTATIONS

EXAMPLES = Path(__file__).parents[2] / "examples"
SEQ, HIDDEN, HEADS = 2048, 2048, 16


@pytest.fixture(scope="module")
def pricer():
    source = f"{EXAMPLES / 'gpt.py'}:gpt_1_3b"
    family = trace_family(load_model(source, seq_len=SEQ), dtype="bfloat16")
    return ModelPricer(family, load_cluster("h100-sxm", gpus=8), "bfloat16")


def block(pricer, *, tp=1, sequence_parallel=False, microbatch_size=1):
    choice = ShardingChoice(
        tp=tp, sequence_parallel=sequence_parallel, split_tables=tp > 1,
        microbatch_size=microbatch_size,
    )  # fmt: skip
    return pricer.priced(choice).model.units[2]


def test_saved_activations_are_korthikantis(pricer):
    """34 sbh (arXiv 2205.05198, section 4.1, fused attention) less two dropout masks of 1 sbh,
    plus the log-sum-exp of attention and the norms' statistics in float32."""
    formula = 32 * SEQ * HIDDEN
    statistics = 4 * SEQ * HEADS + 4 * 4 * SEQ
    assert block(pricer).activation_bytes["none"] == pytest.approx(formula + statistics, rel=0.001)


def test_activations_grow_with_the_microbatch(pricer):
    one, four = (block(pricer, microbatch_size=b).activation_bytes["none"] for b in (1, 4))
    assert four == pytest.approx(4 * one, rel=1e-3)


def test_full_recomputation_keeps_the_input_only(pricer):
    assert block(pricer).activation_bytes["full"] == 2 * SEQ * HIDDEN


def test_recomputation_trades_time_for_memory(pricer):
    unit = block(pricer)
    kept = [unit.activation_bytes[kind] for kind in RECOMPUTATIONS]
    again = [unit.recompute[kind].compute_s for kind in RECOMPUTATIONS]
    assert kept == sorted(kept, reverse=True)
    assert again == sorted(again)
    assert again[0] == 0
    # The last projection is not computed again: it is what the last saved tensor feeds.
    assert 0.6 * unit.forward_s < again[2] < 0.95 * unit.forward_s


def test_tensor_parallelism_splits_parameters_and_most_activations(pricer):
    whole, split = block(pricer), block(pricer, tp=4)
    parameters = 12 * HIDDEN**2 + 13 * HIDDEN
    assert whole.trained_bytes == 4 * parameters
    # Norms and the biases of row projections stay whole.
    kept_whole = 4 * HIDDEN + 2 * HIDDEN
    assert split.trained_bytes == 4 * ((parameters - kept_whole) // 4 + kept_whole)
    # Inputs of the norms and of the two column projections stay whole: 2 + 2 + 2 + 2 sbh.
    formula = (8 + 24 / 4) * SEQ * HIDDEN
    assert split.activation_bytes["none"] == pytest.approx(formula, rel=0.01)


def test_sequence_parallelism_splits_the_norms_and_keeps_gathered_inputs(pricer):
    split = block(pricer, tp=4, sequence_parallel=True)
    formula = (4 + 28 / 4) * SEQ * HIDDEN
    assert split.activation_bytes["none"] == pytest.approx(formula, rel=0.01)
    assert split.summed_gradient_bytes == 4 * 4 * HIDDEN


def test_an_all_reduce_forward_and_one_backward_for_attention_and_mlp(pricer):
    cluster = load_cluster("h100-sxm", gpus=8)
    group = comm_group(cluster, MeshAxis(size=4, stride=1))
    one = all_reduce_s(2 * SEQ * HIDDEN, group)
    unit = block(pricer, tp=4)
    assert unit.forward_comm_s == pytest.approx(2 * one)
    assert unit.backward_comm_s == pytest.approx(2 * one)
    assert unit.recompute["full"].comm_s == pytest.approx(one)
