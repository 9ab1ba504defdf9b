"""Plans tiny models of many families with tensor parallelism, runs the scripts, prints a table.

Alone: ``python tests/bench/families.py [--out FILE.md] [--results FILE.jsonl] [TYPE ...]``.
With ``--check`` scripts are held to their plans without data instead (``plan check``): traffic must
be equal, and the table has how far memory is off.
Results are appended to the second file as they come, and what it holds is not run again; with
``--known`` nothing else is run either, and the table shows the families that it holds.
"""

import argparse
import json
import math
import re
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "run"))

from driver import IMPORTED
from in_float64 import run_scripts_in_float64
from launch import (
    arguments_of,
    largest_difference,
    largest_weight_difference,
    outcome_of,
    run_jobs,
)

from planner.vocabulary import split_styles

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2": {"tp": 2},
    "dp 2 x tp 2": {"tp": 2, "dp_shard": 2},
    "tp 2 x pp 2": {"tp": 2, "pp": 2},
    "tp 4": {"tp": 4},
    "pp 2": {"pp": 2},
    "pp 2 divided": {"pp": 2, "schedule": "ZBVZeroBubble"},
    "cp 2": {"cp": 2},
    "cp 2 x pp 2": {"cp": 2, "pp": 2},
    "tp 2 x cp 2": {"tp": 2, "cp": 2},
    "tp 2 x cp 2 x pp 2": {"tp": 2, "cp": 2, "pp": 2},
    "tp 4 x cp 2": {"tp": 4, "cp": 2},
    "tp 2 x cp 4": {"tp": 2, "cp": 4},
    "ep 2": {"dp_shard": 2, "ep": 2},
    "ep 2 x dp 2": {"dp_shard": 4, "ep": 2},
    "ep 2 x pp 2": {"dp_shard": 2, "ep": 2, "pp": 2},
    "tp 2 x ep 2": {"tp": 2, "ep": 2},
    "tp 2 x ep 4": {"tp": 2, "dp_shard": 2, "ep": 4},
    "cp 2 x ep 2": {"cp": 2, "ep": 2},
    "cp 2 x ep 4": {"cp": 2, "dp_shard": 2, "ep": 4},
    "tp 2 x cp 2 x ep 4": {"tp": 2, "cp": 2, "ep": 4},
    "2 chunks": {"dp_shard": 2, "loss_chunks": 2},
    "2 chunks x pp 2": {"dp_shard": 2, "pp": 2, "loss_chunks": 2},
    "2 chunks x tp 2": {"tp": 2, "loss_chunks": 2},
    "2 chunks x cp 2": {"cp": 2, "loss_chunks": 2},
    "2 chunks x tp 2 x cp 2": {"tp": 2, "cp": 2, "loss_chunks": 2},
    "full": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "full x tp 2": {"tp": 2, "activation_checkpointing": "full"},
    "selective x tp 2": {"tp": 2, "activation_checkpointing": "selective"},
}


def processes(fix: dict) -> int:
    """Ranks of a layout: those of ep are some of dp_shard's."""
    return math.prod(fix.get(axis, 1) for axis in ("dp_shard", "tp", "cp", "pp"))


LIMIT = 1e-8
"""Largest relative difference to one process in float64."""

SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim"), 64),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim", "d_embed", "entity_emb_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "text_encoder_layers", "text_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 8),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 8),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 4),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "n_inner", "hidden_dim"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "dim_ff"), 128),
    **dict.fromkeys(("d_inner", "block_ff_dim", "intermediate_size_mlp", "dff"), 128),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("shared_intermediate_size", "expert_ffn_hidden_size"), 64),
    **dict.fromkeys(("moe_shared_expert_intermediate_size",), 64),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_size", "key_length", "kv_channels"), 8),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    "moe_num_experts": 4,
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 32),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "first_k_dense_replace": 1,
    "vocab_size": 256,
    "image_size": 32,
    "patch_size": 8,
    "num_mel_bins": 16,
    "num_labels": 8,
}
"""Sizes by the names that configs have for them; those that a config lacks are left out."""

DROPOUTS = re.compile(r"drop|layerdrop|jitter|mask_(time|feature)_prob")

MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
HYBRID = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
CONVOLUTIONS = {
    "conv_dim": [16, 16, 16],
    "conv_stride": [5, 4, 4],
    "conv_kernel": [10, 8, 8],
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "num_feat_extract_layers": 3,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
}

SPECIAL = {
    "gemma2": {"query_pre_attn_scalar": 8, "sliding_window": 8},
    "gemma3_text": {"query_pre_attn_scalar": 8, "sliding_window": 8},
    "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "phi3": {"pad_token_id": 0},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "gpt_bigcode": {"multi_query": False},
    "nemotron": {"num_key_value_heads": 4},
    "esm": {"vocab_size": 32, "pad_token_id": 1, "mask_token_id": 31, "token_dropout": False},
    "beit": {"out_features": None, "out_indices": None, "stage_names": None},
    "dinov2": {"out_features": None, "out_indices": None, "stage_names": None},
    "whisper": {"decoder_start_token_id": 1, "max_source_positions": 16},
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {**MAMBA, "layer_types": ["linear_attention", "full_attention"] * 2},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "zamba": {
        "mamba_dt_rank": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 16,
        "layers_block_type": HYBRID,
    },
    "zamba2": {
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "chunk_size": 8,
        "adapter_rank": 8,
        "layers_block_type": HYBRID,
        "num_key_value_heads": 8,
    },
    **{
        name: {"head_dim": 8, "num_key_value_heads": 8}
        for name in (
            "deepseek_v2",
            "deepseek_v3",
            "minicpm3",
            "youtu",
            "longcat_flash",
            "glm4_moe_lite",
        )
    },
    "longcat_flash": {"num_layers": 2, "zero_expert_num": 2, "num_key_value_heads": 8},
    **{name: {"head_dim": 8} for name in ("ministral", "hunyuan_v1_dense", "hunyuan_v1_moe")},
    "xlnet": {"d_model": 64, "d_head": 8, "n_head": 8},
    "rwkv": {"attention_hidden_size": 64},
    "recurrent_gemma": {"lru_width": 64, "num_key_value_heads": 4},
    "dbrx": {
        "attn_config": {"kv_n_heads": 4, "rope_theta": 1e4},
        "ffn_config": {
            "hidden_size": 64,
            "ffn_hidden_size": 128,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "gemma3n_text": {
        "activation_sparsity_pattern": [0.0] * 4,
        "num_kv_shared_layers": 0,
        "laurel_rank": 8,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 256,
        "intermediate_size": 128,
        "sliding_window": 8,
    },
    "gemma4_text": {
        "per_layer_config": None,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 256,
        "sliding_window": 8,
    },
    "t5gemma": {
        side: {
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "attention_dropout": 0.0,
            "dropout_rate": 0.0,
        }
        for side in ("encoder", "decoder")
    },
    "jetmoe": {"num_key_value_heads": 4, "num_attention_heads": 8},
    "marian": {"decoder_vocab_size": 256, "decoder_start_token_id": 0, "pad_token_id": 0},
    "fsmt": {"src_vocab_size": 256, "tgt_vocab_size": 256, "langs": ["en", "de"]},
    "deepseek_v2": {"head_dim": 8, "num_key_value_heads": 8, "num_experts_per_tok": 2},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "attention", "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "moe_shared_expert_intermediate_size": 64,
        "chunk_size": 8,
    },
    "funnel": {"block_sizes": [2, 2], "num_decoder_layers": 2, "d_head": 8},
    "roc_bert": {"pronunciation_vocab_size": 32, "shape_vocab_size": 32},
    **{
        name: {
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        }
        for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid")
    },
    "reformer": {
        "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": [16, 48],
        "lsh_num_chunks_before": 0,
    },
    "xlm": {"n_words": 256},
    "flaubert": {"n_words": 256},
    "luke": {"entity_vocab_size": 16},
    "xlstm": {"embedding_dim": 64, "num_blocks": 4, "chunk_size": 8},
    **{
        name: {
            "vision_config": {
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 4,
                "num_attention_heads": 8,
                "image_size": 32,
                "patch_size": 8,
                "num_patches": 16,
            }
        }
        for name in ("clip", "siglip", "siglip2", "metaclip_2")
    },
    **{
        name: {
            "embed_dim": 32,
            "depths": [2, 2],
            "num_heads": [4, 8],
            "window_size": 4,
            "patch_size": 4,
            "out_features": None,
            "out_indices": None,
        }
        for name in ("swin", "swinv2", "donut-swin")
    },
    **{
        name: {
            "hidden_sizes": [32, 64],
            "depths": [2, 2],
            "num_stages": 2,
            "patch_size": 4,
            "out_features": None,
            "out_indices": None,
        }
        for name in ("convnext", "convnextv2")
    },
    "segformer": {
        "num_encoder_blocks": 2,
        "hidden_sizes": [32, 64],
        "depths": [2, 2],
        "sr_ratios": [2, 1],
        "num_attention_heads": [4, 8],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "mlp_ratios": [2, 2],
    },
    "pvt": {
        "num_encoder_blocks": 2,
        "hidden_sizes": [32, 64],
        "depths": [2, 2],
        "sequence_reduction_ratios": [2, 1],
        "num_attention_heads": [4, 8],
        "patch_sizes": [4, 2],
        "strides": [4, 2],
        "mlp_ratios": [2, 2],
    },
    "pvt_v2": {
        "num_encoder_blocks": 2,
        "hidden_sizes": [32, 64],
        "depths": [2, 2],
        "sr_ratios": [2, 1],
        "num_attention_heads": [4, 8],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "mlp_ratios": [2, 2],
    },
    "levit": {
        "hidden_sizes": [64, 96, 128],
        "num_attention_heads": [4, 6, 8],
        "depths": [2, 2, 2],
        "image_size": 64,
    },
    "hiera": {
        "embed_dim": 32,
        "depths": [2, 2],
        "num_heads": [4, 8],
        "image_size": [64, 64],
        "num_query_pool": 1,
        "masked_unit_size": [8, 8],
    },
    "poolformer": {
        "hidden_sizes": [32, 64],
        "depths": [2, 2],
        "num_encoder_blocks": 2,
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "padding": [2, 1],
    },
    "resnet": {
        "embedding_size": 16,
        "hidden_sizes": [32, 64],
        "depths": [2, 2],
        "out_features": None,
        "out_indices": None,
    },
    "regnet": {
        "embedding_size": 16,
        "hidden_sizes": [32, 64],
        "depths": [2, 2],
        "groups_width": 16,
    },
    "mobilevit": {
        "hidden_sizes": [32, 48, 64],
        "neck_hidden_sizes": [8, 16, 16, 32, 32, 48, 64],
        "num_attention_heads": 4,
        "image_size": 64,
        "patch_size": 2,
    },
    "focalnet": {
        "embed_dim": 32,
        "depths": [2, 2],
        "focal_levels": [2, 2],
        "focal_windows": [3, 3],
        "hidden_sizes": [32, 64],
        "patch_size": 4,
        "out_features": None,
        "out_indices": None,
    },
    "speech_to_text": {"conv_channels": 64, "max_source_positions": 64},
    "moonshine": {
        "encoder_num_hidden_layers": 2,
        "decoder_num_hidden_layers": 2,
        "encoder_num_attention_heads": 8,
        "decoder_num_attention_heads": 8,
        "encoder_num_key_value_heads": 8,
        "decoder_num_key_value_heads": 8,
    },
    **{name: {"vocab_size": 32, "conv_depthwise_kernel_size": 7} for name in ("wav2vec2-bert",)},
    "wav2vec2-conformer": {
        **CONVOLUTIONS,
        "conv_stride": [10, 8, 8],
        "vocab_size": 32,
        "conv_depthwise_kernel_size": 7,
    },
    **{
        name: CONVOLUTIONS
        for name in (
            "wav2vec2",
            "hubert",
            "unispeech",
            "unispeech-sat",
            "sew",
            "wavlm",
            "data2vec-audio",
        )
    },
}
"""What a type needs beyond that."""

FAMILIES = {
    "decoder": (
        "gpt2 llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 opt bloom gpt_neox "
        "gptj stablelm olmo olmo2 granite cohere starcoder2 gpt_bigcode mpt codegen "
        "smollm3 helium glm nemotron apertus arcee bamba biogpt bitnet cohere2 ctrl cpmant "
        "diffllama doge ernie4_5 exaone4 falcon falcon_h1 falcon_mamba gemma3n_text gemma4_text "
        "glm4 gpt_neo gpt_neox_japanese hunyuan_v1_dense jais2 lfm2 mamba mamba2 minicpm3 "
        "ministral modernbert-decoder nanochat olmo3 olmo_hybrid openai-gpt persimmon "
        "qwen3_5_text qwen3_next recurrent_gemma rwkv seed_oss vaultgemma xglm xlnet xlstm "
        "youtu zamba2"
    ),
    "experts": (
        "mixtral qwen2_moe olmoe granitemoe qwen3_moe afmoe aria_text deepseek_v2 deepseek_v3 "
        "dots1 ernie4_5_moe exaone_moe flex_olmo glm4_moe glm4_moe_lite gpt_oss granitemoehybrid "
        "granitemoeshared hunyuan_v1_moe jamba jetmoe lfm2_moe llama4_text longcat_flash "
        "mimo_v2_flash minimax minimax_m2 nemotron_h phimoe qwen3_5_moe_text solar_open"
    ),
    "encoder": (
        "bert roberta electra albert distilbert mpnet camembert ernie modernbert esm big_bird "
        "convbert data2vec-text deberta deberta-v2 eurobert flaubert fnet funnel ibert "
        "jina_embeddings_v3 layoutlm longformer luke megatron-bert mobilebert mra nomic_bert "
        "nystromformer reformer rembert roberta-prelayernorm roc_bert roformer squeezebert xlm "
        "xlm-roberta xlm-roberta-xl xmod yoso"
    ),
    "encoder-decoder": (
        "t5 bart mt5 pegasus m2m_100 mbart blenderbot bigbird_pegasus blenderbot-small fsmt led "
        "longt5 marian mvp nllb-moe pegasus_x plbart prophetnet switch_transformers t5gemma umt5"
    ),
    "vision": (
        "vit deit beit dinov2 ijepa clip convnext convnextv2 data2vec-vision "
        "dinov2_with_registers focalnet hiera imagegpt mobilevit poolformer pvt pvt_v2 regnet "
        "resnet segformer siglip siglip2 swin swinv2 vit_msn"
    ),
    "speech": (
        "whisper audio-spectrogram-transformer data2vec-audio hubert moonshine sew "
        "speech_to_text unispeech wav2vec2 wav2vec2-bert wav2vec2-conformer wavlm"
    ),
}
"""Types of config by what their models are."""

CLASSES = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "ctc": "MODEL_FOR_CTC_MAPPING_NAMES",
    "audio": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
}
TABLES = {
    "decoder": ("causal",),
    "experts": ("causal",),
    "encoder": ("masked",),
    "encoder-decoder": ("seq2seq",),
    "vision": ("image",),
    "speech": ("speech", "ctc", "audio"),
}


@dataclass(kw_only=True)
class Row:
    """One family under all layouts."""

    family: str
    model_type: str
    results: dict[str, str] = field(default_factory=dict)
    """By layout: "equal" with what is split, or why it was refused, or how it failed."""


def class_of(kind: str, model_type: str) -> str:
    from transformers.models.auto import modeling_auto

    for table in TABLES[kind]:
        names = getattr(modeling_auto, CLASSES[table])
        if model_type in names:
            found = names[model_type]
            return found if isinstance(found, str) else found[0]
    raise KeyError(f"{model_type} has no {kind}")


def write_config(folder: Path, kind: str, model_type: str) -> Path:
    """Write the config of a tiny model of a type, without dropout."""
    from transformers import CONFIG_MAPPING

    known = CONFIG_MAPPING[model_type]().to_dict()
    small = {name: size for name, size in SMALL.items() if type(known.get(name)) is int}
    still = {
        name: 0.0
        for name, value in known.items()
        if DROPOUTS.search(name) and isinstance(value, float)
    }
    ids = {
        name: 0
        for name, value in known.items()
        if name.endswith("_token_id") and isinstance(value, int) and value >= 256
    }
    changes: dict[str, Any] = {**small, **still, **ids, **SPECIAL.get(model_type, {})}
    document = CONFIG_MAPPING[model_type](**changes).to_dict()
    document |= {"architectures": [class_of(kind, model_type)], "model_type": model_type}
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps(document, default=str))
    return file


def fast_links(folder: Path) -> str:
    """The CPU cluster with links so fast that the layouts are those of large models."""
    from planner.hardware.profiles import PROFILES_FOLDER

    text = (PROFILES_FOLDER / "clusters" / "cpu.toml").read_text()
    text = re.sub(r"(latency_us_per_\w+ = \{ value =) \d+", r"\1 0", text)
    text = re.sub(r"(unidirectional = \{ value =) [\d.]+", r"\1 10000", text)
    path = folder / "fast.toml"
    path.write_text(text)
    return str(path)


def split_words(best) -> str:
    """How many of the blocks have something split, and which modules of the first kind of block."""
    if best.loss_chunks > 1:
        return f"{best.loss_chunks} chunks of {best.loss_module}"
    blocks = [unit for unit, name in enumerate(best.units) if name not in ("prologue", "epilogue")]
    styles = split_styles(best.degrees.split_axis)
    split = {
        unit
        for group in best.shardings
        for unit in group.units
        if any(module.style in styles for module in group.modules)
    }
    covered = sum(unit in split for unit in blocks)
    modules = sorted(
        {
            module.module.rpartition(".")[2] or module.module
            for group in best.shardings
            if set(group.units) & set(blocks)
            for module in group.modules
            if module.style in styles
        }
    )
    return (
        f"{covered}/{len(blocks)} blocks"
        + (", sequence" if best.sequence_parallel else "")
        + f": {' '.join(modules)}"
    )


def plan_layout(
    config: Path, folder: Path, cluster: str, fix: dict, *, samples: int, seq_len: int
) -> tuple[str, str]:
    """Plan one layout and write its script: what is split, or why it was refused."""
    import planner
    from planner.errors import PlannerError

    gpus = processes(fix)
    try:
        result = planner.plan(
            str(config), gpus=gpus, cluster=cluster, dtype="float64", global_batch_size=samples,
            seq_len=None if {"vision", "speech"}.intersection(folder.parts) else seq_len,
            fix={**fix, "microbatch_size": samples // 4} if "pp" in fix else fix,
        )  # fmt: skip
        result.save(folder, force=True)
    except PlannerError as error:
        return "refused", " ".join(str(error).split())[:400]
    except Exception as error:
        traceback.print_exc()
        return "PLANNING FAILED", f"{type(error).__name__}: {error}"[:160]
    return "planned", split_words(result.best)


def try_family(
    kind: str, model_type: str, root: Path, cluster: str, layouts, *, checked: bool
) -> Row:
    """Plan and run a family, or check its plans, under all layouts."""
    row = Row(family=kind, model_type=model_type)
    base = root / kind / model_type
    try:
        config = write_config(base / "model", kind, model_type)
    except Exception as error:
        row.results = dict.fromkeys(layouts, f"no config: {error}"[:120])
        return row
    planned = {}
    # Memory is that of activations where there are some; no data is made for it.
    size = {"samples": 64, "seq_len": 64} if checked else {"samples": 8, "seq_len": 16}
    for name in layouts:
        folder = base / name.replace(" ", "")
        status, words = plan_layout(config, folder, cluster, LAYOUTS[name], **size)
        row.results[name] = f"{status}: {words}"
        if status == "planned":
            planned[name] = folder
    if checked:
        for name, folder in planned.items():
            words = row.results[name].partition(": ")[2]
            row.results[name] = f"{_check(folder)}: {words}"
    elif planned:
        _run_all(row, planned)
    return row


def _check(folder: Path) -> str:
    """Whether a script's traffic is its plan's, and how far its memory is off."""
    from planner.checking.check import check_plan
    from planner.errors import PlannerError

    try:
        check = check_plan(folder)
    except PlannerError as error:
        return f"FAILED: {' '.join(str(error).split())[:200]}"
    worst = max((stage.error for stage in check.stages), key=abs)
    differing = [
        f"{each.kind} {each.predicted_count} planned, {each.counted_count} run"
        for each in check.collectives
        if not each.is_equal
    ]
    words = f"TRAFFIC DIFFERS ({'; '.join(differing)})" if differing else "equal traffic"
    return f"{words}, memory {worst:+.1%}"


def _run_all(row: Row, planned: dict[str, Path]) -> None:
    expected = {}
    for name in list(planned):
        size = _microbatch_size(planned[name])
        if size not in expected:  # statistics of a batch and balancing losses depend on it
            expected[size] = _reference(planned[name])
        if isinstance(expected[size], str):
            row.results[name] = expected[size]
            del planned[name]
    by_size: dict[int, list[str]] = {}
    for name in planned:
        by_size.setdefault(processes(LAYOUTS[name]), []).append(name)
    for gpus, names in by_size.items():
        together = _failure([planned[name] for name in names], gpus) if len(names) > 1 else "?"
        for name in names:
            words = row.results[name].partition(": ")[2]
            failure = together and _failure([planned[name]], gpus)
            found = expected[_microbatch_size(planned[name])]
            row.results[name] = (
                f"FAILED: {failure} ({words})"
                if failure
                else _compared(outcome_of(planned[name], steps=2), found, words)
            )


def _microbatch_size(folder: Path) -> int:
    return json.loads((folder / "plan.json").read_text())["best"]["microbatch_size"]


def _reference(folder: Path):
    """Train as one process in a plan's microbatches: the outcome, or how it failed."""
    job = arguments_of(folder, name="reference", steps=2, extra=("--reference",))
    try:
        run_jobs([(folder, job)], timeout_s=300, function=run_scripts_in_float64)
    except AssertionError as error:
        return f"reference failed: {last_line(error)}"
    return outcome_of(folder, name="reference", steps=2)


def _failure(folders: list[Path], gpus: int) -> str:
    """Run scripts one after the other in one group: what failed, "" where nothing did."""
    jobs = [(folder, arguments_of(folder, steps=2)) for folder in folders]
    try:
        run_jobs(jobs, num_processes=gpus, timeout_s=300, function=run_scripts_in_float64)
    except AssertionError as error:
        return last_line(error)
    return ""


def _compared(found, expected, words: str) -> str:
    worst = max(
        largest_difference(found.losses, expected.losses),
        largest_weight_difference(found.weights, expected.weights),
    )
    return f"{'equal' if worst < LIMIT else 'DIFFERS'} {worst:.0e}: {words}"


def last_line(error: AssertionError) -> str:
    lines = [line for line in str(error).splitlines() if line.strip() and line[0] not in " [-"]
    errors = [line for line in lines if re.match(r"\w*(\.\w+)*(Error|Exception)\b", line)]
    return (errors or lines or ["?"])[0][:200]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--layout", action="append", choices=LAYOUTS)
    parser.add_argument("--known", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    layouts = options.layout or list(LAYOUTS)
    known = rows_of(options.results) if options.results and options.results.exists() else {}
    rows = []
    IMPORTED.append("transformers.modeling_utils")
    with TemporaryDirectory() as folder:
        cluster = fast_links(Path(folder))
        for kind, model_type in wanted(options.types):
            start_s = time.perf_counter()
            if options.known and (kind, model_type) not in known:
                continue
            row = known.get((kind, model_type)) or Row(family=kind, model_type=model_type)
            rows.append(row)
            open_layouts = [name for name in layouts if name not in row.results]
            if not open_layouts or options.known:
                continue
            root = Path(folder)
            new = try_family(kind, model_type, root, cluster, open_layouts, checked=options.check)
            row.results |= new.results
            if options.results is not None:
                with options.results.open("a") as file:
                    print(json.dumps(asdict(new)), file=file)
            print(f"{kind} {model_type} ({time.perf_counter() - start_s:.0f} s)", flush=True)
            for name, result in new.results.items():
                print(f"    {name:12} {result}", flush=True)
    print(summary(rows))
    if options.out is not None:
        options.out.write_text(document(rows, layouts))


def wanted(types: list[str]) -> Iterator[tuple[str, str]]:
    """Families and types of those asked for, all where none are."""
    for kind, listed in FAMILIES.items():
        for model_type in listed.split():
            if not types or model_type in types:
                yield kind, model_type


def rows_of(file: Path) -> dict[tuple[str, str], Row]:
    """Read the results of earlier runs."""
    rows: dict[tuple[str, str], Row] = {}
    for line in file.read_text().splitlines():
        new = Row(**json.loads(line))
        row = rows.setdefault((new.family, new.model_type), new)
        row.results |= new.results
    return rows


def summary(rows: list[Row]) -> str:
    results = [result for row in rows for result in row.results.values()]
    equal = sum(result.startswith("equal") for result in results)
    refused = sum(result.startswith("refused") for result in results)
    failed = len(results) - equal - refused
    under_tp = [row.results["tp 2"] for row in rows if "tp 2" in row.results]
    full = sum(is_split_throughout(result) for result in under_tp)
    return (
        f"{len(rows)} families, {len(results)} layouts: {equal} equal, {refused} refused, "
        f"{failed} failed. Under tp 2 {full} of {len(under_tp)} are equal with something split in "
        "every block"
    )


def is_split_throughout(result: str) -> bool:
    """Whether a result is equal, with something split in each of the blocks."""
    found = re.match(r"equal \S+ (\d+)/(\d+) blocks", result)
    return found is not None and found[1] == found[2]


WORDS = """# Families under tensor parallelism

Tiny models of Hugging Face families, planned with links fast enough that splitting pays, run on
gloo in float64 for two steps, and compared with one process: the largest relative difference of
losses and weights, in how many blocks something is split, and what. "sequence" is sequence
parallelism. Made by `python tests/bench/families.py --out docs/families.md`.

"""


def document(rows: list[Row], layouts: list[str]) -> str:
    """The table with what it shows."""
    lines = ["| family | type | " + " | ".join(layouts) + " |", "|---" * (2 + len(layouts)) + "|"]
    for row in rows:
        cells = [row.results.get(name, "not run").replace("|", "/") for name in layouts]
        lines.append(f"| {row.family} | {row.model_type} | " + " | ".join(cells) + " |")
    return WORDS + summary(rows) + ".\n\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
