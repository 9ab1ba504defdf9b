"""What a row is taken to be: framework, cluster, model, and what it leaves open."""

import re

import pytest
from run_tables import make_runs

from planner.errors import ModelError
from planner.validation.pricing.cases import RunError, case_of, unpriced_because

GPT = {
    **{"arch": "gpt", "framework": "megatron", "gpu": "A100-80GB-SXM", "hidden": 2048},
    **{"ffn": 8192, "heads": 16, "kv_heads": None, "vocab": 50304, "params_b": None},
}


def case(**change):
    (run,) = make_runs(change)
    return case_of(run)


def refused(**change):
    with pytest.raises(RunError) as caught:
        case(**change)
    return caught.value


def test_a_sound_row_leaves_nothing_open():
    found = case()
    assert (found.framework.name, found.cluster) == ("nanotron", "h100-sxm")
    assert (found.dtype, found.recompute, found.assumptions) == ("bfloat16", "none", ())
    assert found.num_microbatches == 256 // (2 * 4)
    shape = found.shape
    assert (shape.layers, shape.hidden, shape.ffn, shape.heads) == (16, 2048, 8192, 32)
    assert shape.gated
    assert not shape.biases
    assert shape.vocab_size == 131072


def test_what_a_row_leaves_open_is_filled_in_and_told():
    found = case(heads=None, kv_heads=None, vocab=None, precision=None, recompute=None)
    assert found.assumptions == (
        "heads 16 (not stated)",
        "vocab 131072 (not stated)",
        "dtype bfloat16 (not stated)",
        "recompute none (not stated)",
    )
    assert found.shape.kv_heads == 16


def test_heads_that_are_not_stated_divide_by_tp():
    found = case(heads=None, kv_heads=None, hidden=1536, tp=8, pp=1, dp=1)
    assert found.shape.heads == 16


def test_the_width_of_an_mlp_has_a_usual_value():
    assert case(**GPT | {"ffn": None}).shape.ffn == 4 * 2048
    # Llama 2 7B: 8/3 of 4096, rounded up to a multiple of 256.
    assert case(hidden=4096, ffn=None).shape.ffn == 11008


def test_the_vocabulary_is_padded_for_tensor_parallelism():
    assert case(vocab=50257, tp=1, dp=4).shape.vocab_size == 50257
    assert case(vocab=50257).shape.vocab_size == 50432
    assert 50432 % (2 * 128) == 0


def test_a_gpt_has_biases_and_learned_positions():
    shape = case(**GPT).shape
    assert shape.biases
    assert shape.learned_positions
    assert shape.tied
    assert not shape.gated
    assert shape.kv_heads == 16


@pytest.mark.parametrize(("params_b", "tied"), [(1.34, True), (1.61, False), (None, False)])
def test_the_stated_size_tells_whether_the_head_is_the_embedding(params_b, tied):
    # Blocks of 16 (4 h^2 + 3 h ffn) = 1.074e9 and tables of 0.268e9.
    assert case(params_b=params_b).shape.tied is tied


def test_the_last_microbatch_may_be_smaller():
    found = case(global_batch=250)
    assert found.num_microbatches == 31
    assert found.assumptions == ("microbatches 31 (dp x micro_batch leaves a rest)",)


@pytest.mark.parametrize(
    ("change", "column", "words"),
    [
        ({"gpu": "H1000"}, "gpu", "accelerator 'H1000' is of no cluster profile"),
        ({"cp": 2, "dp": 1}, None, r"context parallelism \(cp 2\) is not modelled"),
        ({"global_batch": 4}, None, "dp 2 x micro_batch 4 > global_batch 4"),
        ({"pp": 8, "dp": 1, "tp": 1, "layers": 8, "vpp": 2}, None, "stages per rank > layers 8"),
        ({"zero_stage_or_fsdp": "3"}, None, "ZeRO-3"),
    ],
)
def test_a_refused_row_says_why_and_where(change, column, words):
    error = refused(**change)
    assert error.column == column
    assert re.search(words, str(error))
    (run,) = make_runs(change)
    unpriced = unpriced_because(run, error)
    assert (unpriced.row, unpriced.column) == (0, column)
    assert "\n" not in unpriced.reason


def test_near_names_are_offered():
    assert "H100-80GB-SXM" in refused(gpu="H100-80GB").hint


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"framework": "own-fork"}, "megatron"),
        (
            {"framework": "own-fork", "pp": 1, "tp": 1, "dp": 8, "zero_stage_or_fsdp": "3"},
            "planner",
        ),
        (GPT | {"framework": "megatron-deepspeed", "source": "own log"}, "megatron"),
    ],
)
def test_a_framework_without_a_profile_is_priced_as_the_nearest(change, name):
    found = case(**change)
    assert found.framework.name == name
    assert f"framework as {name} ({change['framework']} has no profile)" in found.assumptions


def test_a_profile_goes_by_its_own_name_as_well():
    found = case(**GPT | {"framework": "megatron-sc21", "source": "own log"})
    assert found.framework.name == "megatron-sc21"
    assert not any("has no profile" in each for each in found.assumptions)


def test_any_framework_is_priced_on_any_cluster():
    found = case(**GPT | {"gpu": "H100-80GB-SXM"})
    assert (found.framework.name, found.cluster) == ("megatron", "h100-sxm")
    assert case(gpu="a100-80gb-sxm-roce").cluster == "a100-80gb-sxm-roce"


def test_an_open_form_of_sharding_and_microbatch_are_assumed_and_told():
    found = case(zero_stage_or_fsdp=None, micro_batch=None)
    assert (found.run.data_parallel, found.run.microbatch_size) == ("zero1", 1)
    assert found.assumptions == (
        "micro_batch 1 (not stated)",
        "zero_stage_or_fsdp zero1 (not stated)",
    )


def test_other_errors_have_no_column():
    (run,) = make_runs({})
    unpriced = unpriced_because(run, ModelError("it cannot be traced", hint="try this"))
    assert unpriced.column is None
    assert unpriced.reason == "it cannot be traced; try this"


def test_embedding_and_head_may_have_stages_of_their_own():
    """8 ranks x 3 stages for 22 blocks, embedding and head (Qi et al. 2024, table 4)."""
    change = GPT | {
        **{"source": "Zero Bubble PP (arXiv 2401.10241) Table 4", "layers": 22, "pp": 8},
        **{"vpp": 3, "tp": 1, "dp": 1, "schedule": "1F1B-I", "zero_stage_or_fsdp": "0"},
    }
    assert case(**change).run.virtual_stages == 3
    assert "8 x 4 stages per rank > layers 22" in str(refused(**change | {"vpp": 4}))
