"""Models that a Hugging Face config describes, against the same models run for real."""

import json
import socket
from dataclasses import dataclass

import pytest
import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from planner.cli.main import run
from planner.errors import ModelError, RequestError
from planner.graph.loading import hf_load
from planner.graph.loading.load import load_model
from planner.graph.operator_graph import Phase
from planner.graph.trace import trace_model

SIZE = 2

DECODER = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
ENCODER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
SPEECH = {
    "vocab_size": 40,
    "conv_dim": (8, 8, 8),
    "conv_kernel": (10, 8, 8),
    "conv_stride": (10, 8, 8),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Case:
    """A small model, and the FLOPs that torch's counter does not see in its forward pass."""

    class_name: str
    config_class: str
    config: dict
    grouped_flop: int = 0


def experts_flop(*, layers: int, chosen: int, hidden: int, intermediate: int) -> int:
    """Every token goes through gate, up and down of each expert that it is sent to."""
    return layers * SIZE * 32 * chosen * 2 * 3 * hidden * intermediate


CASES = {
    "llama": Case("LlamaForCausalLM", "LlamaConfig", DECODER),
    "qwen3": Case("Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 16}),
    "gemma2": Case(
        "Gemma2ForCausalLM", "Gemma2Config", {**DECODER, "head_dim": 8, "sliding_window": 16}
    ),
    "gemma3_text": Case(
        "Gemma3ForCausalLM", "Gemma3TextConfig", {**DECODER, "head_dim": 8, "sliding_window": 16}
    ),
    "mistral": Case(
        "MistralForCausalLM", "MistralConfig", {**DECODER, "head_dim": 8, "sliding_window": 16}
    ),
    "gpt2": Case(
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            **{"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
            **{"bos_token_id": 0, "eos_token_id": 0},
        },
    ),
    "mixtral": Case(
        "MixtralForCausalLM",
        "MixtralConfig",
        {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2},
        experts_flop(layers=2, chosen=2, hidden=32, intermediate=48),
    ),
    "qwen3_moe": Case(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            **DECODER,
            **{"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16},
            "head_dim": 8,
        },
        experts_flop(layers=2, chosen=3, hidden=32, intermediate=16),
    ),
    "deepseek_v3": Case(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **DECODER,
            **{"num_key_value_heads": 4, "num_hidden_layers": 3, "first_k_dense_replace": 1},
            **{"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
            **{"v_head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2},
            **{"topk_group": 1, "moe_intermediate_size": 16, "n_shared_experts": 1},
        },
        experts_flop(layers=2, chosen=2, hidden=32, intermediate=16),
    ),
    "t5": Case(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            **{"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2},
            **{"num_heads": 4, "n_positions": 32},
        },
    ),
    "bert": Case(
        "BertForMaskedLM",
        "BertConfig",
        {**ENCODER, "vocab_size": 96, "max_position_embeddings": 32},
    ),
    "roberta": Case(
        "RobertaForSequenceClassification",
        "RobertaConfig",
        {**ENCODER, "vocab_size": 96, "max_position_embeddings": 34, "num_labels": 3},
    ),
    "vit": Case(
        "ViTForImageClassification",
        "ViTConfig",
        {**ENCODER, "image_size": 32, "patch_size": 8, "num_labels": 5},
    ),
    "resnet": Case(
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "num_labels": 5},
    ),
    "whisper": Case(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **{"vocab_size": 96, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2},
            **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 8},
            **{"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_source_positions": 24},
            **{"max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1},
            **{"eos_token_id": 2, "decoder_start_token_id": 1},
        },
    ),
    "wav2vec2": Case("Wav2Vec2ForCTC", "Wav2Vec2Config", {**ENCODER, **SPEECH}),
    "hubert": Case("HubertForSequenceClassification", "HubertConfig", {**ENCODER, **SPEECH}),
}


def write(folder, document):
    file = folder / "config.json"
    file.write_text(json.dumps(document, default=str))
    return str(file)


def config_of(case, **changes):
    config = getattr(transformers, case.config_class)(
        **{**case.config, "architectures": [case.class_name], **changes}
    )
    return config.to_dict()


@dataclass(frozen=True)
class Traced:
    """A trace, and the same step run for real."""

    case: Case
    graph: object
    model: torch.nn.Module
    forward_flop: int


@pytest.fixture(scope="module", params=CASES)
def traced(request, tmp_path_factory):
    case = CASES[request.param]
    source = write(tmp_path_factory.mktemp(request.param), config_of(case))
    loaded = load_model(source)
    assert loaded.description == f"{source}:{case.class_name}"
    assert loaded.notes == ()
    graph = trace_model(loaded, microbatch_size=SIZE, dtype="float32")
    torch.manual_seed(0)
    model, batch = loaded.make_model(), loaded.example_batch(SIZE)
    counter = FlopCounterMode(display=False)
    with loaded.running("Running for real"), sdpa_kernel(SDPBackend.MATH):
        with counter:
            loss = loaded.loss(model(**batch.kwargs), batch.targets)
        loss.backward()
    return Traced(case, graph, model, counter.get_total_flops())


def test_parameters_are_those_of_the_real_model(traced):
    real = {name: tuple(each.shape) for name, each in traced.model.named_parameters()}
    assert {each.names[0]: each.shape for each in traced.graph.parameters} == real


def test_gradients_reach_the_parameters_that_they_reach_in_a_real_run(traced):
    graph = traced.graph
    reached = {each.names[0] for each in graph.parameters if each.gradient is not None}
    real = {name for name, each in traced.model.named_parameters() if each.grad is not None}
    assert reached == real
    unreached = {name for name, each in traced.model.named_parameters() if each.requires_grad}
    # Wav2Vec2 has an embedding for masked steps, and these configs mask none.
    assert unreached - real <= {"wav2vec2.masked_spec_embed", "hubert.masked_spec_embed"}


def test_forward_flop_are_those_that_torch_counts_in_a_real_run(traced):
    # torch's counter sees attention as two products, but not the grouped products of experts.
    assert traced.graph.forward_flop == traced.forward_flop + traced.case.grouped_flop


# What is built ---------------------------------------------------------------------------------


def test_a_folder_is_its_config(tmp_path):
    source = write(tmp_path, config_of(CASES["llama"]))
    assert load_model(str(tmp_path)).file == source


@pytest.mark.parametrize("named", [None, ["LlamaModel"]])
def test_without_a_head_the_first_that_fits_is_built_and_told(tmp_path, named):
    loaded = load_model(write(tmp_path, config_of(CASES["llama"], architectures=named)))
    assert loaded.description.endswith(":LlamaForCausalLM")
    (note,) = loaded.notes
    assert "LlamaForCausalLM is trained" in note
    encoder = load_model(write(tmp_path, config_of(CASES["bert"], architectures=None)))
    assert encoder.description.endswith(":BertForMaskedLM")


def test_every_head_has_its_labels(tmp_path):
    for case, class_name, labels in (
        ("llama", "LlamaForTokenClassification", {"labels": (SIZE, 32)}),
        ("bert", "BertForQuestionAnswering", {"start_positions": (2,), "end_positions": (2,)}),
        ("whisper", "WhisperForAudioClassification", {"labels": (SIZE,)}),
    ):
        document = config_of(CASES[case], architectures=[class_name])
        loaded = load_model(write(tmp_path, document))
        inputs = loaded.example_batch(SIZE).kwargs
        assert {name: inputs[name].shape for name in labels} == labels
        assert trace_model(loaded, microbatch_size=SIZE, dtype="float32").backward_flop > 0


def test_a_batch_is_random_within_the_vocabulary(tmp_path):
    inputs = load_model(write(tmp_path, config_of(CASES["llama"]))).example_batch(64).kwargs
    assert (inputs["input_ids"].min(), inputs["input_ids"].max()) == (0, 95)
    assert torch.equal(inputs["input_ids"], inputs["labels"])


@pytest.mark.parametrize(
    ("problem", "num_labels", "dtype", "shape"),
    [
        (None, 5, torch.int64, (SIZE,)),
        (None, 1, torch.float32, (SIZE,)),
        ("regression", 3, torch.float32, (SIZE, 3)),
        ("multi_label_classification", 3, torch.float32, (SIZE, 3)),
    ],
)
def test_labels_are_what_the_problem_type_asks_for(tmp_path, problem, num_labels, dtype, shape):
    document = config_of(CASES["vit"], problem_type=problem, num_labels=num_labels)
    loaded = load_model(write(tmp_path, document))
    labels = loaded.example_batch(SIZE).kwargs["labels"]
    assert (labels.dtype, tuple(labels.shape)) == (dtype, shape)
    assert trace_model(loaded, microbatch_size=SIZE, dtype="bfloat16").backward_flop > 0


@pytest.mark.parametrize(
    ("case", "changes", "asked", "length"),
    [
        ("llama", {}, None, 32),
        ("llama", {"max_position_embeddings": 8192}, None, 2048),
        ("llama", {}, 64, 64),  # rotary positions have no table
        ("gpt2", {}, 16, 16),
        ("gpt2", {"n_positions": 100}, None, 96),  # a multiple of 8
        ("roberta", {}, None, 32),  # 34 rows, the first two of which stand for padding
        ("whisper", {}, None, 32),
        ("vit", {}, None, None),
    ],
)
def test_the_sequence_length(tmp_path, case, changes, asked, length):
    loaded = load_model(write(tmp_path, config_of(CASES[case], **changes)), seq_len=asked)
    assert loaded.seq_len == length
    batch = loaded.example_batch(SIZE).kwargs
    assert batch["labels"].shape[1:] in ((), (length,))


def test_the_compute_dtype_is_not_that_of_the_checkpoint(tmp_path):
    document = {**config_of(CASES["llama"]), "dtype": "float16"}
    graph = trace_model(load_model(write(tmp_path, document)), microbatch_size=1, dtype="float32")
    dtypes = {value.dtype for value in graph.values if value.requires_grad}
    assert dtypes == {"float32"}


def test_causal_attention_is_fused_and_knows_that_it_is_causal(tmp_path):
    loaded = load_model(write(tmp_path, config_of(CASES["llama"])))
    for size in (1, 2):
        graph = trace_model(loaded, microbatch_size=size, dtype="bfloat16")
        attention = [op for op in graph.nodes if op.name == "_scaled_dot_product_flash_attention"]
        assert len(attention) == 2
        assert all(op.phase is Phase.FORWARD and op.arguments[4] is True for op in attention)
        assert all(graph.values[op.inputs[1]].shape[1] == 2 for op in attention)  # grouped heads


def test_nothing_is_fetched_or_printed(tmp_path, monkeypatch, capfd):
    def refuse(*_):
        raise AssertionError("no connection is needed")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    verbosity = transformers.logging.get_verbosity()
    loaded = load_model(write(tmp_path, config_of(CASES["deepseek_v3"], use_cache=True)))
    trace_model(loaded, microbatch_size=1, dtype="bfloat16")
    assert capfd.readouterr() == ("", "")
    assert transformers.logging.get_verbosity() == verbosity


# What is refused -------------------------------------------------------------------------------


def refused(source, *needles, kind=ModelError, seq_len=None):
    with pytest.raises(kind) as error:
        load_model(source, seq_len=seq_len)
    for needle in needles:
        assert needle in str(error.value)
    assert error.value.hint
    return error.value


def test_files_that_are_no_config(tmp_path):
    refused(str(tmp_path / "config.json"), "config.json cannot be read: No such file")
    refused(str(tmp_path), "config.json cannot be read", "config.json of a Hugging Face model")
    text = json.dumps(config_of(CASES["llama"]))
    (tmp_path / "config.json").write_text(text[: len(text) // 2])
    refused(str(tmp_path), "is not JSON", "complete")
    refused(write(tmp_path, {"hidden_size": 8}), "no model_type")
    refused(write(tmp_path, ["llama"]), "no model_type")


def test_types_that_transformers_does_not_have(tmp_path, capsys):
    refused(write(tmp_path, {"model_type": "no_such_type"}), "no such type", "Write a model file")
    own_code = {"model_type": "odd", "auto_map": {"AutoConfig": "modeling_odd.OddConfig"}}
    refused(write(tmp_path, own_code), "'odd'", "auto_map", "downloaded code is not run")
    assert run([str(tmp_path), "--gpus", "8"]) == 5
    assert "auto_map" in capsys.readouterr().err


def test_a_config_with_code_of_its_own_whose_type_is_known_needs_none_of_it(tmp_path):
    document = {**config_of(CASES["llama"]), "auto_map": {"AutoModelForCausalLM": "odd.Odd"}}
    assert load_model(write(tmp_path, document)).description.endswith("LlamaForCausalLM")


def test_models_that_there_are_no_data_for(tmp_path):
    pretraining = config_of(CASES["bert"], architectures=["BertForPreTraining"])
    refused(write(tmp_path, pretraining), "BertForPreTraining", "BertForMaskedLM", "architectures")
    refused(write(tmp_path, transformers.VitDetConfig().to_dict()), "'vitdet'", "none")
    several = transformers.Gemma3Config(architectures=["Gemma3ForConditionalGeneration"])
    refused(write(tmp_path, several.to_dict()), "takes pixel_values beside tokens")


def test_values_that_contradict_each_other(tmp_path):
    document = {**config_of(CASES["llama"]), "hidden_size": 33}
    refused(write(tmp_path, document), "hidden size", "33")


def test_without_transformers_the_extra_is_named(tmp_path, monkeypatch):
    source = write(tmp_path, config_of(CASES["llama"]))
    monkeypatch.setattr(hf_load.importlib.util, "find_spec", lambda name: None)
    refused(source, "transformers is not installed", "parallel-training-planner[hf]")


def test_sequence_lengths_that_the_model_does_not_take(tmp_path):
    source = write(tmp_path, config_of(CASES["vit"]))
    refused(source, "--seq-len 16", "pixel_values", kind=RequestError, seq_len=16)
    for case, most in (("gpt2", 32), ("bert", 32), ("roberta", 32), ("whisper", 32)):
        source = write(tmp_path, config_of(CASES[case]))
        words = (f"--seq-len {most + 1}", f"a table of {most} positions", f"Ask for {most}")
        refused(source, *words, kind=RequestError, seq_len=most + 1)
        assert load_model(source, seq_len=most).seq_len == most
